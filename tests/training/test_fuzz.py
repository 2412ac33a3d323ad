"""Broken checkpoints, configurations and data files: hundreds of them, each refused in one clear message or read in full.

Anything but a UserError fails the test; so does a checkpoint that is loaded although a byte of it has changed.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.mesh import Mesh
from tests.training.toy import Toy, checkpointer, empty, quiet
from training.config import Config, load_config
from training.config_loading import leaves
from training.data import Loader, PackedDataset
from training.errors import UserError
from training.masters import load_masters
from training.packing import packed_path
from training.run_state import RunState, locate

CASES = 100  # of each kind of file; checkpoints: twice 60
TEXTS = [b"", b"\0", b"\xff\xfe", b"null", b"-1", b"1e999", b"[" * 2000, b'{"a":' * 600, b"\n\t: :", b"!!python/object:os.system"]


def broken(data: bytes, rng: random.Random) -> bytes:
    """`data` with a bit flipped, a piece cut out, doubled, replaced, or its end missing."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(6):
        case 0:
            place = rng.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        case 1:
            return data[:a]
        case 2:
            return data[:a] + data[b:]
        case 3:
            return data[:a] + rng.choice(TEXTS) + data[a:]
        case 4:
            return data[:a] + rng.choice(TEXTS) + data[min(b, a + 8) :]
    return data[:b] + data[a:]


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        assert str(error).strip() and "Traceback" not in str(error)
        return "refused"
    return "read"


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpointer(tmp_path_factory.mktemp("fuzz") / "run").save(1, 1, None)


@pytest.mark.parametrize("sealed", [True, False], ids=["with checksums", "without"])
def test_broken_checkpoints(whole: Path, tmp_path: Path, sealed: bool) -> None:
    rng, seen = random.Random(1), Counter()
    names = ["__0_0.distcp", ".metadata", "state.json"] + ["checksums.json"] * sealed
    for case in range(60):
        folder = tmp_path / f"{case}/checkpoints/step_00000001"
        shutil.copytree(whole, folder)
        name = names[case % len(names)]
        before = (folder / name).read_bytes()
        after = broken(before, rng)
        (folder / name).write_bytes(after)
        if not sealed:
            (folder / "checksums.json").unlink()
        model = Toy()
        reader = checkpointer(tmp_path / str(case), model=model, optimizer=empty(model))
        got = outcome(lambda reader=reader: reader.restore(quiet))
        seen[got] += 1
        if sealed and before != after and name != "checksums.json":
            assert got == "refused", f"case {case}: {name} was changed and read"
        outcome(lambda folder=folder: load_masters(locate(str(folder), quiet), Toy(), Mesh.solo()))
        shutil.rmtree(tmp_path / str(case))
    assert seen["refused"] > 30, seen


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = tuple(RunState.__dataclass_fields__)


@settings(max_examples=40)
@given(name=st.sampled_from(FIELDS), value=JSON, drop=st.booleans())
def test_state_json_with_any_value_anywhere(whole: Path, name: str, value: Any, drop: bool) -> None:
    fields = json.loads((whole / "state.json").read_text())
    if drop:
        fields.pop(name)
    else:
        fields[name] = value
    folder = whole.parent.parent / "fields"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text(json.dumps(fields))

    def read() -> None:
        state = RunState.read(folder)
        state.check(folder, Config().model, "tok", "data", quiet)
        assert state.step >= 0 and state.consumed >= 0

    outcome(read)


# ---------------------------------------------------------------- configurations


def test_broken_configurations(base: Path, tmp_path: Path) -> None:
    rng, seen, text = random.Random(2), Counter(), (base / "run.yaml").read_bytes()
    for case in range(CASES):
        path = tmp_path / f"{case}.yaml"
        path.write_bytes(broken(text, rng))
        seen[outcome(lambda path=path: load_config(str(path)))] += 1
    assert seen["refused"] > CASES // 2, seen


@settings(max_examples=120)
@given(key=st.sampled_from(sorted(leaves(Config))), value=JSON)
def test_any_value_under_any_key(base: Path, key: str, value: Any) -> None:
    path = base / "any.yaml"
    section, _, name = key.rpartition(".")
    nested: Any = {name: value}
    for part in reversed(section.split(".")):
        nested = {part: nested}
    path.write_text(yaml.safe_dump(nested, allow_unicode=True))
    outcome(lambda: load_config(str(path)))


def test_a_configuration_cannot_run_code(tmp_path: Path) -> None:
    target, path = tmp_path / "ran", tmp_path / "evil.yaml"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"):
        path.write_text(f"run: {{name: {tag} ['{target}']}}\n")
        assert outcome(lambda: load_config(str(path))) == "refused"
        assert outcome(lambda tag=tag: load_config(str(path), [f"run.name={tag} ['{target}']"])) == "refused"
    assert not target.exists()


# ---------------------------------------------------------------- data


def test_broken_data_files(base: Path, tmp_path: Path) -> None:
    rng, seen = random.Random(3), Counter()
    source = Path(packed_path(str(base), "train"))
    for case in range(CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        for suffix in (".bin", ".json"):
            shutil.copy(source.with_suffix(suffix), folder / f"train{suffix}")
        broke = folder / ("train.bin" if case % 3 == 0 else "train.json")
        broke.write_bytes(broken(broke.read_bytes(), rng))

        def read(path: str = str(folder / "train.bin")) -> None:
            data = PackedDataset(path, 64)
            loader = Loader(data, global_batch=2, micro_batch=1, seed=0)
            for _ in range(3):
                for batch in next(loader):
                    assert 0 <= int(batch.tokens_BS.min()) and int(batch.tokens_BS.max()) < data.info.vocab_size
            data.bits_per_byte(1.0)

        seen[outcome(read)] += 1
    assert seen["refused"] > CASES // 2, seen


def test_a_token_outside_of_the_vocabulary_is_named(base: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".json"):
        shutil.copy(Path(packed_path(str(base), "train")).with_suffix(suffix), tmp_path / f"train{suffix}")
    tokens = np.memmap(tmp_path / "train.bin", dtype="<u2", mode="r+")
    tokens[:] = 65535
    tokens.flush()
    with pytest.raises(UserError, match="holds token 65535 of a vocabulary of"):
        PackedDataset(str(tmp_path / "train.bin"), 64).rows(np.array([0]))
