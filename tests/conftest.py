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
def fresh_process():
    """What outlives a test in a process, and the next one must not inherit: Accelerate's state,
    and oneDNN, which torch turns off at the first bfloat16 product on a CPU without such."""
    yield
    torch.backends.mkldnn.set_flags(True)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
