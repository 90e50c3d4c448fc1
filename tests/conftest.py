import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), *(str(HERE / name) for name in ("train", "faults"))]
torch.set_num_threads(1)

# the longest first: with two workers one of them must not come last
LONG = ("test_launch", "test_ensembles", "test_train_operator", "test_fault_kill",
        "test_fault_silence", "test_parallel_parts", "test_parity", "test_dry_run",
        "test_fault_wandb", "test_train_codec", "test_train_steady", "test_evaluate",
        "test_fault_step", "test_late", "test_morning")


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: hours of faults; only with `pytest -m soak`")
    config.addinivalue_line("markers", "slurm: a Slurm on loopback; only with `pytest -m slurm`")
    if not config.option.markexpr:
        config.option.markexpr = "not soak and not slurm"
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


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


@pytest.fixture(scope="session", autouse=True)
def blank():
    """Pictures of roll-outs take seconds: they stay empty where no test looks at them."""
    with patch("ups.eval.finish.draw_rollouts"):
        yield


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces and differentiates as always; its C++ code would take a minute."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic=None, **options: compiler(
        function, dynamic=dynamic, backend="aot_eager"))
