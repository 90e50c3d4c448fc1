import by_hand
import pytest


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """{task: (path, u)}; the names say nothing, so that only content can tell the task."""
    folder = tmp_path_factory.mktemp("published")
    files = {}
    for i, task in enumerate(by_hand.TASKS):
        path = folder / task / f"file{i}.h5"
        path.parent.mkdir()
        frames = 14 if task == "diffreact2d" else by_hand.T  # its trajectories start at frame 10
        files[task] = path, by_hand.build(task, path, frames=frames, seed=i)
    return files
