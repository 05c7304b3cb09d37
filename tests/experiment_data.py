"""Made-up public text for experiments, in files named as the real ones, so that they run in a stranger's clone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = {
    "Staff": ("nurse", "doctor", "receptionist"),
    "Care received": ("treatment", "operation", "medicine"),
    "Communication": ("letter", "phone call", "leaflet"),
}
TONES = {"critical": ("late", "rude", "useless"), "not critical": ("kind", "clear", "helpful")}
COMMENTS, PUBLIC, TAGGED = "nhs_feedback_9class.jsonl.gz", "medical_abstracts_5class.jsonl.gz", "entities.jsonl.gz"


def write_data(folder: Path, comments: int = 600) -> Path:
    """Comments with topic, tone and hospital, two thirds for training; other public text; tagged sentences."""
    chance = np.random.default_rng(0)
    rows = []
    for number in range(comments):
        topic, tone = list(TOPICS)[int(chance.integers(3))], list(TONES)[int(chance.integers(2))]
        about, said = chance.choice(TOPICS[topic]), chance.choice(TONES[tone])
        rows.append(
            {
                "text": f"The {about} on ward {number} was {said} and we waited {int(chance.integers(60))} minutes.",
                "label": topic, "sentiment": tone, "hospital": f"Trust {'ABC'[number % 3]}",
                "split": "test" if number % 3 == 0 else "train",
            }
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / COMMENTS, rows)
    public = [
        {
            "text": f"Patients with disorder {number} were given drug {number % 7} and followed up.",
            "label": f"c{number % 5}",
        }
        for number in range(120)
    ]
    _write(folder / PUBLIC, public)
    sentences = [
        {
            "tokens": ["They", "had", "the", things[number % 3].split()[0], "again"],
            "tags": ["O", "O", "O", "B-Thing" if number % 3 else "O", "O"],
            "split": "test" if number % 5 == 0 else "train",
        }
        for things in TOPICS.values()
        for number in range(60)
    ]
    _write(folder / TAGGED, sentences)
    return folder


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
