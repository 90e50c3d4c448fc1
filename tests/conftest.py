import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: hours of faults; only with `pytest -m soak`")
    if not config.option.markexpr:
        config.option.markexpr = "not soak"


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state for the whole process; a test must not inherit another's."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
