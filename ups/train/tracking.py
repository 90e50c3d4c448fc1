"""`metrics.jsonl`: the record of a run, one JSON object per line, each with its `step`."""

import json
from pathlib import Path


class Metrics:
    """Append metrics to a file that is cut back to the checkpoint's step when a run resumes."""

    def __init__(self, path):
        self.path = Path(path)

    def write(self, step, values):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def read(self):
        """All whole lines; a last line that a kill cut short is dropped."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def cut(self, step):
        """Forget what was written after `step`."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self.path)
