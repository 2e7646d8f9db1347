"""Nothing of MLX or mlx-lm is changed for the process: no class, no module, no layer once its engine is closed."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="needs MLX: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'dflash[mlx]' (Linux: 'dflash[mlx-cpu]')")

from mlx.utils import tree_map  # noqa: E402

from dflash.backends.mlx.target import MLXTarget  # noqa: E402
from dflash.types import Proposal  # noqa: E402
from tests.backends import tiny_pair  # noqa: E402
from tests.backends.mlx.families import FAMILIES, MAX_LENGTH, tokens  # noqa: E402
from tests.backends.pairs import GREEDY, PROMPTS, open_mlx_engine  # noqa: E402
from tests.backends.tiny_pair import random_draft, save_draft  # noqa: E402


def attributes() -> dict[str, Any]:
    """Every attribute of every module and class of both packages that is loaded."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("mlx", "mlx_lm") or module is None:
            continue
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if not key.startswith("__")}
        for key, value in list(vars(module).items()):
            if inspect.isclass(value) and str(value.__module__).partition(".")[0] in ("mlx", "mlx_lm"):
                # The counters of abstract classes change by themselves.
                found |= {f"{name}.{key}.{own}": one for own, one in vars(value).items() if own != "_abc_impl"}
    return found


def test_modules_and_classes_stay_as_they_were(target_folder: Path, trained_folder: Path, tmp_path: Path) -> None:
    """Fault: a class-wide wrap, which gives the second draft of a process the first one's taps. Two engines with
    different drafts, open together and closed in the order in which they were opened, and a family whose recurrent
    layers are run again."""
    other = save_draft(
        tmp_path / "other", random_draft(tiny_pair.draft_config(target_layer_ids=(1, 2), block_size=6), seed=4)
    )
    open_mlx_engine(target_folder, None).close()  # imports on use are no patches
    model = FAMILIES["Qwen3.5"].build()
    before = attributes()
    assert sum(key.startswith("mlx_lm.models.llama.") for key in before) > 20
    engines = [open_mlx_engine(target_folder, folder) for folder in (trained_folder, other)]
    texts = [engine.generate(PROMPTS[0], GREEDY).token_ids for engine in engines]
    assert texts[0] == texts[1]
    engines[0].close()
    assert engines[1].generate(PROMPTS[0], GREEDY).token_ids == texts[0]
    engines[1].close()
    kinds = [type(layer) for layer in model.layers]
    target = MLXTarget(model, max_length=MAX_LENGTH, taps=(0,))
    session = target.session()
    session.prefill([1, 2, 3])
    session.verify(4, Proposal((5, 6)))
    session.commit(range(2))
    assert [type(layer) for layer in model.layers] != kinds  # layers are watched, each by a class of its own ...
    target.close()
    assert [type(layer) for layer in model.layers] == kinds  # ... and get their old one back
    after = attributes()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    assert changed == []


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("name", ["Llama", "Qwen3.5"])
def test_a_copy_of_an_open_target_is_a_model_of_its_own(name: str, how: Callable[[Any], Any]) -> None:
    """Fault: layers of a class made for an open target cannot be stored, or a deep copy's tell that target what they
    compute, which knows nothing of them."""
    model = FAMILIES[name].build()
    kinds = [type(module) for module in model.modules()]
    target = MLXTarget(model, max_length=MAX_LENGTH, taps=(0, 1))
    assert (target.no_trees is None) == (name == "Llama")
    assert [type(module) for module in model.modules()] != kinds
    ids = mx.array([tokens(9)])
    expected = model(ids)
    twin = how(model)
    assert [type(module) for module in twin.modules()] == kinds
    with target.recorder.recording() as rows:
        model(ids)
        twin(ids[:, :4])
    assert [one.shape[1] for one in rows] == [9, 9]
    model.update(tree_map(mx.zeros_like, model.parameters()))
    assert mx.array_equal(twin(ids), expected)
    target.close()
    assert [type(module) for module in model.modules()] == kinds
