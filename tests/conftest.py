"""Settings shared by all tests."""

import hypothesis

# Derandomised: the same commit gives the same result. No deadline: a busy machine is no failure.
hypothesis.settings.register_profile("octet", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("octet")
