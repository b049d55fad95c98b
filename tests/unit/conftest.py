"""Settings of all unit tests."""

import hypothesis

# How long an example takes says more of the machine's load than of the code.
hypothesis.settings.register_profile("unit", deadline=None)
hypothesis.settings.load_profile("unit")
