"""The version. The build, the package and the checks between ranks all read it from here."""

__version__ = "0.1.0"
