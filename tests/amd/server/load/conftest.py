"""The fixtures that the load tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.amd.server.load.model_folder import write_model
from tests.amd.server.load.served import Served, served


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model) as server:
        yield server
