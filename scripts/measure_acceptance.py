"""Acceptance length of a draft on many long answers, in minutes.

    python scripts/measure_acceptance.py gsm8k math500 --data-dir ./eval

What a greedy chain accepts depends on the target's greedy text alone. So the target answers all prompts of a set in one
batch, the draft proposes behind every token of the answers at once, and the rounds are then walked: an anchor whose
first k guesses stand in the text is followed by the anchor k + 1 further on. `--check N` also decodes N prompts of each
set by the real loop. Texts of a batch may leave those of single prompts at near-ties; the lengths hardly change.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.backends.torch.draft_loading import load_draft
from dflash.backends.torch.draft_model import DraftModel
from dflash.backends.torch.loading import LoadedTarget, choose_device, choose_dtype, end_of_sequence_ids, load_target
from dflash.backends.torch.target import TorchTarget
from dflash.bench.datasets.base import load_questions
from dflash.prepare.regenerate import Answerer
from dflash.resolve import resolve_draft, resolve_target
from dflash.train.anchors import draw_blocks
from dflash.train.evaluate import decode_report
from dflash.train.features import OnlineFeatures
from dflash.train.setup import decoder_layers, frozen_head
from dflash.train.step import collate, forward_blocks

ANCHORS_AT_ONCE = 64


class Walker:
    """Proposals of one draft behind every token of an answer, and the rounds that follow from them."""

    def __init__(self, target: LoadedTarget, network: DraftModel) -> None:
        self.network, self.head = network, frozen_head(target.model, network)
        self._features = OnlineFeatures(
            target.model.get_decoder(), decoder_layers(target.model), network.config.target_layer_ids
        )
        kept = network.vocabulary or range(self.head.embed_VH.shape[0])
        self._token_of_row = torch.tensor(list(kept))

    @torch.inference_mode()
    def right(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.bool_]:
        """[A, B - 1] whether slot i of the block behind answer token a says what stands there."""
        ids = np.array([*prompt, *answer])
        mask = np.arange(len(ids)) >= len(prompt)
        features = self._features.features(ids.tolist())
        found: list[NDArray[np.bool_]] = []
        blocks = draw_blocks(
            ids, mask, block_size=self.network.config.block_size, num_anchors=len(ids), rng=np.random.default_rng(0)
        )
        for begin in range(0, len(blocks.anchors_A), ANCHORS_AT_ONCE):
            part = type(blocks)(*(rows[begin : begin + ANCHORS_AT_ONCE] for rows in vars(blocks).values()))
            batch = collate([features], [ids], [part])
            hidden = forward_blocks(self.network, batch, self.head.embed_VH)[0, :, 1:]
            guesses = self._token_of_row[(hidden @ self.head.head_KH.T).argmax(-1).cpu()].numpy()
            found.append((guesses == part.labels_AT) & part.supervised_AT)
        return np.concatenate(found) if found else np.zeros((0, self.network.config.block_size - 1), dtype=np.bool_)


def rounds(right_AT: NDArray[np.bool_], width: int) -> list[int]:
    """Acceptance lengths of the rounds, bonus included, with `width` guesses per round."""
    prefix = right_AT[:, :width].cumprod(axis=1).sum(axis=1)
    at, lengths = 0, []
    while at < len(prefix):
        lengths.append(min(int(prefix[at]) + 1, len(prefix) - at))
        at += lengths[-1]
    return lengths


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="names of published sets or .jsonl files")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype")
    parser.add_argument("--check", type=int, default=0, help="prompts per set decoded by the real loop as well")
    options = parser.parse_args()
    device = choose_device(None)
    place = resolve_target(options.target)
    target = load_target(place, dtype=choose_dtype(options.dtype, device), device=device)
    network = load_draft(resolve_draft(options.draft or options.target, place).path, device, target.model.dtype)
    walker, answerer = Walker(target, network), Answerer(target, max_new_tokens=options.max_new_tokens, temperature=0.0)
    widths = range(1, network.config.block_size)
    means: list[list[float]] = []
    for name in options.sets:
        questions = load_questions(name, data_dir=options.data_dir, limit=options.limit)
        prompts = [answerer.prompt_ids(one.opening()) for one in questions.conversations]
        answers = answerer.answer(prompts)
        rights = [walker.right(*pair) for pair in zip(prompts, answers, strict=True)]
        walked = [[rounds(right, width) for right in rights] for width in widths]
        means.append([sum(map(sum, each)) / max(1, sum(map(len, each))) for each in walked])
        line = f"{name:12s} {len(prompts):3d} prompts {sum(map(len, answers)):6d} tokens  by width "
        print(line + " ".join(f"{mean:.3f}" for mean in means[-1]), flush=True)
        if options.check:
            check(target, network, prompts[: options.check], options.max_new_tokens, walked[-1])
    print("mean of the sets" + " " * 26 + " ".join(f"{mean:.3f}" for mean in np.mean(means, axis=0)))


def check(
    target: LoadedTarget, network: DraftModel, prompts: list[list[int]], most_new: int, walked: list[list[int]]
) -> None:
    """Decode some prompts by the real loop, and print both acceptance lengths."""
    adapter = TorchTarget(target.model, taps=network.config.target_layer_ids)
    report = decode_report(
        network, adapter, prompts, eos_ids=end_of_sequence_ids(target), max_new_tokens=most_new
    )  # fmt: skip
    adapter.close()
    same = [length for lengths in walked[: len(prompts)] for length in lengths]
    print(
        f"    the real loop on {len(prompts)}: {report.acceptance_length:.3f} ({report.num_tokens} tokens in "
        f"{report.num_rounds} rounds); walked {sum(same) / len(same):.3f} ({sum(same)} in {len(same)})"
    )


if __name__ == "__main__":
    main()
