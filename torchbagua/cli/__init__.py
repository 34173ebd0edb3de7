"""The `torchbagua` command: one module per subcommand, each with `main(arguments) -> exit status`.

May import everything; nothing imports it.
Begin with __main__.py, which imports and runs the subcommand; then trace.py.
namespaces.py, which is no subcommand, emulates networks for the demo and for the benchmarks.
"""
