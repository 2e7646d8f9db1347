"""A whole language model in a draft's place: how its folder is told from a draft's, and whether its tokens are the
target's. Knows configs and vocabularies, no models.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from dflash.core.draft_config import CONFIG_FILE
from dflash.core.safetensors_files import inside, read_json, stored_tensors
from dflash.errors import CheckpointError, PairError

_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")
"""Of Transformers' class names of models that write text."""
_DRAFT_KEYS = frozenset(
    {
        "block_size",
        "dflash_config",
        "draft_vocab_size",
        "dspine_config",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "norm_before_residual",
        "mask_token_id",
        "projector_type",
        "speculators_config",
        "speculators_model_type",
        "target_layer_ids",
    }
)
"""Keys that only drafts have; some of them name a class of their target's kind."""


def is_language_model(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json describes a model that writes text by itself, and not a draft of any kind."""
    names = raw.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    is_draft = bool(_DRAFT_KEYS & raw.keys()) or any(key.startswith("dspark_") for key in raw)
    return not is_draft and any(name.endswith(_ENDINGS) for name in names)


def folder_is_language_model(folder: Path) -> bool:
    """The same of a folder. Raises CheckpointError for a config.json that cannot be read.

    EAGLE drafts have the config of a language model of one layer; their tensors tell them apart.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    raw = read_json(inside(folder, CONFIG_FILE), "draft's config")
    if not is_language_model(raw):
        return False
    try:
        return not has_eagle_tensors(stored_tensors(folder))
    except CheckpointError:  # the loader of models will say what is wrong with the files
        return True


def has_eagle_tensors(names: Container[str]) -> bool:
    """Whether tensors of these names are an EAGLE draft's: a language model has no `fc` beside its layers."""
    return "fc.weight" in names and "model.embed_tokens.weight" not in names


def check_same_tokens(
    draft: Mapping[str, int], target: Mapping[str, int], *, draft_name: str, target_name: str
) -> None:
    """Compare the vocabularies (token -> id) of two tokenizers.

    The sizes of the models' embeddings may differ, since they are often padded; what an id stands for may not.

    Raises PairError with an example of what differs.
    """
    if draft == target:
        return
    differing = next((token for token, number in target.items() if draft.get(token) != number), None)
    if differing is None:
        what = f"it has {len(draft)} tokens, the target {len(target)}"
    else:
        what = f"token {differing!r} is {draft.get(differing, 'absent')} there and {target[differing]} in the target"
    raise PairError(
        f"'{draft_name}' cannot draft for '{target_name}': its tokenizer is another one ({what}). Use a smaller model "
        "of the target's own family, or a draft that was trained for it."
    )
