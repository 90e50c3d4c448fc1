import dataclasses
import json
import subprocess
import sys

import pytest

from ups.config import RunError, UsageError, build, check, command, flat, parse


@dataclasses.dataclass(frozen=True)
class Model:
    dim: int = 64   # width of the stream
    body: str = "fourier"

    def __post_init__(self):
        if self.dim % 2:
            raise ValueError(f"dim {self.dim} must be even.")
        check(self, dim=(2, 1024))


@dataclasses.dataclass(frozen=True)
class Base:
    run: str = "runs/x"  # where it goes


@dataclasses.dataclass(frozen=True)
class Config(Base):
    tasks: tuple[str, ...] = ("burgers1d",)
    lr: float = 1e-3    # learning rate, 100 % of it
    steps: int = 10
    compile: bool = False
    samples: int = 0
    model: Model = Model()


def test_defaults_flags_and_nested_fields():
    assert parse(Config, []) == Config()
    got = parse(Config, ["--lr", "1e-4", "--model.dim", "8", "--tasks", "a", "b", "--compile",
                         "--samples", "3", "--run", "r"])
    assert got == Config(run="r", tasks=("a", "b"), lr=1e-4, compile=True, samples=3,
                         model=Model(dim=8))
    assert parse(Config, ["--no-compile"]).compile is False


def test_a_nested_default_of_the_class_itself_holds(capsys):
    @dataclasses.dataclass(frozen=True)
    class Wide(Base):
        model: Model = Model(dim=256)

    assert parse(Wide, []) == Wide() and parse(Wide, ["--model.body", "x"]).model.dim == 256
    with pytest.raises(SystemExit):
        parse(Wide, ["--help"])
    assert "[256]" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_gives_values_and_flags_win(tmp_path, suffix):
    path = tmp_path / f"config.{suffix}"
    values = {"lr": 0.5, "steps": 7, "model": {"dim": 32}, "tasks": ["a"]}
    path.write_text(json.dumps(values))  # JSON is YAML too
    got = parse(Config, ["--config", str(path), "--steps", "9"])
    assert got == Config(lr=0.5, steps=9, tasks=("a",), model=Model(dim=32))


def test_one_number_stands_for_a_tuple_of_one():
    @dataclasses.dataclass(frozen=True)
    class Several:
        sizes: tuple[int, ...] = (8,)
        names: tuple[str, ...] = ("a",)

    assert flat(Several()) == {"sizes": [8], "names": ["a"]}
    assert build(Several, {"sizes": 3, "names": "b"}) == Several((3,), ("b",))
    for wrong in ([4.7, 1], [float("inf")], [None], 0.5):
        with pytest.raises(UsageError, match="sizes: expected int, got"):
            build(Several, {"sizes": wrong})


def test_what_a_run_stores_can_be_read_again(tmp_path):
    cfg = Config(lr=3e-4, tasks=("a", "b"), model=Model(dim=10))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(flat(cfg)))
    assert parse(Config, ["--config", str(path)]) == cfg
    assert build(Config, flat(cfg)) == cfg


@pytest.mark.parametrize("argv, words", [
    (["--learning_rate", "1"], "no field --learning_rate; the nearest is --lr"),
    (["--model.dims", "1"], "no field --model.dims; the nearest is --model.dim"),
    (["--step=3"], "no field --step; the nearest is --steps"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--model.dim", "7"], "--model.dim 7 must be even"),
    (["--model.dim", "0"], "--model.dim must be between 2 and 1024, not 0"),
    (["--config", "absent.json"], "there is no such file"),
    (["stray"], "belongs to no flag"),
])
def test_wrong_use_is_one_sentence(argv, words):
    with pytest.raises(UsageError) as caught:
        parse(Config, argv)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text, words", [
    ('{"lrr": 1}', "no field lrr; the nearest is lr"),
    ('{"model": {"width": 1}}', "no field model.width; the nearest is model.dim"),
    ('{"steps": 1.5}', "steps: expected int, got 1.5"),
    ('{"steps": true}', "steps: expected int, got True"),
    ('{"model": {"dim": 1.5}}', "model.dim: expected int, got 1.5"),
    ('{"compile": "yes"}', "compile: expected bool"),
    ("[1]", "expected a mapping"),
    ("{", "not a readable"),
    ("a: b\n- c: d", "not a readable"),
])
def test_a_wrong_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse(Config, ["--config", str(path)])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_help_shows_every_field_with_its_comment_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--help"], "Teaches.")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for words in ("Teaches.", "where it goes [runs/x]", "learning rate, 100 % of it [0.001]",
                  "--model.dim INT", "width of the stream [64]", "--tasks", "[burgers1d]"):
        assert words in text


@pytest.mark.parametrize("kind, code", [("UsageError", 2), ("FloatingPointError", 1)])
def test_a_command_exits_with_a_sentence_and_no_traceback(tmp_path, kind, code):
    script = tmp_path / "s.py"
    script.write_text("from ups.config import *\n"
                      f"def main(): raise {kind}('do this instead.')\ncommand(main)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True,
                          env={"PYTHONPATH": ".", "PATH": ""})
    assert (done.returncode, done.stderr) == (code, "error: do this instead.\n")


def test_a_reader_that_ends_is_a_sentence(tmp_path):
    """As of `inspect DATA | head -1`."""
    script = tmp_path / "s.py"
    script.write_text("from ups.config import *\ndef main():\n"
                      "    input()\n    print('x' * 100_000)\n    print('y')\ncommand(main)\n")
    done = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={"PYTHONPATH": ".", "PATH": ""})
    done.stdout.close()
    done.stdout = None
    assert done.communicate("\n")[1] == "stopped: what read the output has ended.\n"
    assert done.returncode == 1


@pytest.mark.parametrize("error, shown", [
    (OSError(28, "No space left on device", "x/y"), "[Errno 28] No space left on device: 'x/y';"),
    (RunError("x cannot be written; make room."), "x cannot be written; make room."),
    (FileNotFoundError(2, "No such file", "x"), None)])
def test_a_disk_that_cannot_be_written_is_a_sentence(capsys, error, shown):
    def main():
        raise error

    with pytest.raises(SystemExit if shown else FileNotFoundError) as caught:
        command(main)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {shown}") and caught.value.code == 1 if shown else not said


SLOW = {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"}


def test_scripts_load_no_compiler_and_no_shards_before_they_need_it():
    """They take seconds to load, and --help or a wrong flag would wait for them."""
    scripts = "train_codec, train_operator, train_diffusion, train_consistency, train_steady"
    code = f"import sys, {scripts}, evaluate; sys.exit(bool({SLOW} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
