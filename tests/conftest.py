"""What holds for all tests."""

import os

# Otherwise scikit-learn skips one of its checks of estimators; it must be set before scipy is imported.
os.environ.setdefault("SCIPY_ARRAY_API", "1")
