"""What holds for all tests."""

import logging
import multiprocessing
import os
from collections.abc import Iterator

import pytest

# Otherwise scikit-learn skips one of its checks of estimators; it must be set before scipy is imported.
os.environ.setdefault("SCIPY_ARRAY_API", "1")

# Imported once, by the process that those of `processes` are forked from. It starts when it is first needed.
PRELOADED = """
    featlearn.training._monitor featlearn.training._trainer featlearn.rfm featlearn.dashboard featlearn.reports
    featlearn.datasets.tables featlearn.papers.runner featlearn.cli._input_data sklearn.datasets sklearn.model_selection
    torch.distributed.fsdp torch.nn.parallel torch._dynamo uvicorn starlette.testclient pyarrow.parquet
    typer.rich_utils rich.progress matplotlib.backends.backend_agg
"""
multiprocessing.set_forkserver_preload(PRELOADED.split())


@pytest.fixture
def warnings_logged() -> Iterator[list[str]]:
    """Messages of the library's logger; pytest's own fixture costs every test milliseconds, so its plugin is off."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("featlearn").addHandler(handler)
    yield messages
    logging.getLogger("featlearn").removeHandler(handler)
