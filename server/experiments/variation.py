"""Variations of texts by the generator itself: a beginning of the text stays, and the generator goes on from there.

Private Evolution asks a large model to rephrase (Aug-PE); a small one that only continues text can do this much.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import torch

from common.errors import GenerationError
from common.models.generator import Generator
from common.study import Study

_TRIES = 4
_SHORTEST, _LONGEST = 0.2, 0.7
"""Share of a text's tokens that stays, drawn in between."""


def vary(
    generator: Generator, texts: Sequence[tuple[str, int]], wanted: int, study: Study, seed: Sequence[int]
) -> list[tuple[str, int]]:
    """Variations of (text, code) pairs, each text in turn; fewer than wanted if the generator repeats itself.

    Raises
    ------
    GenerationError
        If the model isn't one that goes on from its prompt.
    """
    if generator.architecture.task_type != "CAUSAL_LM":
        raise GenerationError("variations: an encoder-decoder doesn't go on from the beginning of a text")
    chance = np.random.default_rng(list(seed))
    prompts = generator.prompts(study.codes)
    known = {text for text, _ in texts}
    made: list[tuple[str, int]] = []
    for _ in range(_TRIES):
        missing = list(islice(cycle(texts), wanted - len(made))) if texts else []
        for start in range(0, len(missing), study.pool.batch_size):
            for text, code in _continued(
                generator, missing[start : start + study.pool.batch_size], prompts, study, chance
            ):
                if text and text not in known:
                    known.add(text)
                    made.append((text, code))
    return made


def _continued(
    generator: Generator,
    texts: Sequence[tuple[str, int]],
    prompts: Sequence[Sequence[int]],
    study: Study,
    chance: np.random.Generator,
) -> list[tuple[str, int]]:
    tokenizer, most = generator.tokenizer, study.pool.max_new_tokens
    encoded = generator.encode([text for text, _ in texts], [most] * len(texts))
    kept = [ids[: max(1, int(len(ids) * chance.uniform(_SHORTEST, _LONGEST)))] for ids in encoded]
    begun = [[*prompts[code], *ids] for (_, code), ids in zip(texts, kept, strict=True)]
    longest = max(map(len, begun))
    context = generator.architecture.context or longest + most
    more = min(most - min(map(len, kept)), context - longest)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in begun], device=generator.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in begun], device=generator.device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(chance.integers(2**31)))
        written = generator.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=study.pool.temperature,
            top_p=study.pool.top_p, top_k=0, max_new_tokens=max(more, 1), use_cache=True,
            pad_token_id=pad,
        )  # fmt: skip
    rest = written[:, longest:].tolist()
    whole = [[*own, *added][:most] for own, added in zip(kept, rest, strict=True)]
    said = [" ".join(tokenizer.decode(row, skip_special_tokens=True).split()) for row in whole]
    return [(text, code) for text, (_, code) in zip(said, texts, strict=True)]
