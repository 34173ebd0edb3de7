"""Settings of all tests."""

import hypothesis

# A deadline measures how busy the machine is; the blob lets a failure that CI found be repeated.
hypothesis.settings.register_profile("torchbagua", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torchbagua")
