"""Settings for the whole test run, in force before anything imports torch; subprocesses inherit them."""

import os
import tempfile

# One thread each: xdist workers share the cores, and sums do not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests neither fetch nor report anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# What tests look up is not kept in the user's cache.
os.environ.setdefault("HF_ASSETS_CACHE", os.path.join(tempfile.gettempdir(), "foredraft-tests"))
