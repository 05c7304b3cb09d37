"""The dataset card (``README.md``): what a hub, ``datasets.load_dataset`` and people read first.

Its head is YAML, its body Markdown. Titles, names and texts are data: none of them can end a value of the one or become
structure of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.study import Study
from server.bundle import files
from server.bundle.files import Facts
from server.markdown import code, escaped, excerpt, printable
from server.report import at_most
from server.statement import PrivacyStatement, to_text
from server.summary import Sample

SHOWN_CODES = 30


def card(
    facts: Facts, statement: PrivacyStatement, study: Study, counts: Sequence[int], samples: Sequence[Sample]
) -> str:
    """The whole card.

    Parameters
    ----------
    counts
        Texts of each code, ``(codes,)``.
    samples
        Texts of `files.sample_rows`.
    """
    return head(facts) + "\n".join(
        [
            f"# {escaped(facts.title)}",
            "",
            f"{facts.texts} synthetic texts under {len(study.codes)} control codes, made by a language model that "
            "several sites taught together while no document left its site. With a differential-privacy guarantee: "
            f"(ε={at_most(statement.epsilon)}, δ={statement.delta:g}) for adding or removing one {statement.unit}.",
            "",
            "## Content",
            "",
            *_content(facts, study),
            "",
            "## Codes",
            "",
            *_codes(facts, study, counts),
            "",
            "## Samples",
            "",
            *_samples(samples),
            "",
            "## How it was made",
            "",
            *_making(study, statement),
            "",
            "## Privacy",
            "",
            to_text(statement),
            f"The same for programs: `{files.STATEMENT}`.",
            "",
            "## Limits",
            "",
            *_limits(facts),
            "",
            "## Use and check",
            "",
            *_use(facts),
            "",
            "## Cite",
            "",
            "```bibtex",
            code(citation(facts, statement)),
            "```",
            "",
        ]
    )


def head(facts: Facts) -> str:
    """The card's head: where the data is and what columns it has."""
    features = [
        line
        for name in facts.columns
        for line in (f"  - name: {_yaml(name)}", f"    dtype: {'float64' if name == 'weight' else 'string'}")
    ]
    return "\n".join(
        [
            "---",
            f"pretty_name: {_yaml(facts.title)}",
            f"license: {_yaml(facts.license.lower())}",
            *([f"language:\n- {_yaml(facts.language)}"] if facts.language else []),
            "task_categories:",
            "- text-generation",
            "- text-classification",
            f"size_categories:\n- {_size(facts.texts)}",
            "tags:",
            "- synthetic",
            "- differential-privacy",
            "- fedcorpus",
            "configs:",
            "- config_name: default",
            "  data_files:",
            "  - split: train",
            f"    path: {files.SHARDS}",
            "dataset_info:",
            "  features:",
            *features,
            "  splits:",
            "  - name: train",
            f"    num_bytes: {facts.memory_bytes}",
            f"    num_examples: {facts.texts}",
            f"  download_size: {facts.parquet_bytes}",
            f"  dataset_size: {facts.memory_bytes}",
            "---",
            "",
            "",
        ]
    )


def citation(facts: Facts, statement: PrivacyStatement) -> str:
    """How to cite the corpus (BibTeX, one line)."""
    author = f"author={{{_bibtex(facts.publisher)}}}, " if facts.publisher else ""
    promise = f"epsilon {at_most(statement.epsilon)}, delta {statement.delta:g}, unit {statement.unit}"
    return (
        f"@misc{{fedcorpus-{facts.run_id[:8]}, title={{{_bibtex(facts.title)}}}, {author}year={{{facts.date[:4]}}}, "
        f"note={{Synthetic corpus with differential privacy: {promise}. Study {facts.study_sha256[:16]}}}}}"
    )


def _content(facts: Facts, study: Study) -> list[str]:
    attributes = zip(facts.columns[2:-1], study.codes.attributes, strict=True)
    return [
        f"Parquet in `data/`, the same rows as JSON lines in `{files.JSON_LINES}`.",
        "",
        "| column | type | what |",
        "|---|---|---|",
        "| id | string | place of the text in the corpus |",
        "| text | string | the text |",
        *(
            f"| {escaped(column)} | string | control code: {escaped(a.name)}, one of {len(a.values)} values{more} |"
            for column, a in attributes
            for more in [", of which documents may have several and a text has one" if a.multiple else ""]
        ),
        "| weight | float64 | what the text counts for; with it the shares of the codes are those that the sites "
        "reported, with noise. Adds up to the number of texts |",
    ]


def _codes(facts: Facts, study: Study, counts: Sequence[int]) -> list[str]:
    largest = sorted(range(len(counts)), key=lambda index: (-counts[index], index))
    shown, rest = largest[:SHOWN_CODES], largest[SHOWN_CODES:]
    lines = ["| code | texts |", "|---|---:|"]
    lines += [f"| {escaped(study.codes.label(index))} | {counts[index]} |" for index in sorted(shown)]
    lines += [f"| {len(rest)} more codes | {sum(counts[index] for index in rest)} |"] if rest else []
    if facts.missing:
        holes = list(facts.missing.items())
        named = "; ".join(f"{escaped(label)}: {count}" for label, count in holes[:SHOWN_CODES])
        more = f"; and {len(holes) - SHOWN_CODES} more codes" if len(holes) > SHOWN_CODES else ""
        lines += [
            "",
            f"**{sum(facts.missing.values())} texts are missing**, since the generator gave none: {named}{more}.",
        ]
    return lines


def _samples(samples: Sequence[Sample]) -> list[str]:
    # As code: a reader would make links of addresses even where every character of Markdown is escaped.
    return [
        f"- **{escaped(sample.label)}**: `{code(excerpt(sample.text, files.SAMPLE_CHARACTERS))}`" for sample in samples
    ] or ["- none"]


def _making(study: Study, statement: PrivacyStatement) -> list[str]:
    steps = {
        "strong": f"Strong sites fine-tuned a public language model (`{code(study.generator.base)}`) on their own "
        "documents, each given its control code, with LoRA and DP-SGD; only noised adapters left them, and were "
        "averaged.",
        "weak": "Weak sites, which don't train, voted once: each document for the candidate texts nearest to it. Only "
        "noised counts left them.",
    }
    present = {tier.tier for tier in statement.tiers}
    return [
        *(f"- {words}" for tier, words in steps.items() if tier in present),
        "- Every site gave, once, how many documents it has under each code, with noise. Their sum says how many texts "
        "a code has here.",
        "- Method: Resource-Adaptive Federated Text Generation with Differential Privacy (arXiv 2603.07027), by the "
        f"program fedcorpus. The whole plan is `{files.STUDY}`, fixed before any data was touched.",
    ]


def _limits(facts: Facts) -> list[str]:
    licence = (
        "- No licence is named: ask the publisher before you use it."
        if facts.license == "unknown"
        else f"- Licence: {escaped(facts.license)}."
    )
    return [
        "- The texts are made up. None of them reports what happened, and none is advice.",
        "- Noise hides what is rare: small codes and unusual contents are represented worst.",
        "- What the language model believed before, and what the sites' documents are biased to, shows.",
        "- A text's code is what the model was asked for; it wasn't checked that the text fits it.",
        "- The texts are as the model wrote them, which may be markup, a web address or the formula of a spreadsheet: "
        "show them as plain text.",
        licence,
    ]


def _use(facts: Facts) -> list[str]:
    return [
        "```python",
        'datasets.load_dataset("FOLDER", split="train")',
        'pandas.read_parquet("FOLDER/data")',
        f'mlcroissant.Dataset(jsonld="FOLDER/{files.CROISSANT}").records("texts")',
        "```",
        "",
        "```",
        f"sha256sum --check {files.MANIFEST}              # in the folder: nothing was changed by accident",
        "fedcorpus verify FOLDER --key PUBLISHER.pub      # nor on purpose, and the privacy statement is the study's",
        "fedcorpus verify FOLDER north.json south.json    # also by the sites' own ledgers, if they hand them out",
        "```",
        "",
        f"Signed by the key of fingerprint `{code(facts.signing_key)}`. That says who signed only if the publisher "
        "gave you the key, or its fingerprint, by another way than this folder."
        if facts.signing_key
        else "Not signed: nothing shows who made it.",
        "",
        f"Made on {facts.date} by run `{code(facts.run_id)}` of study `{code(facts.study)}`.",
    ]


def _size(texts: int) -> str:
    """The hub's name for a number of rows."""
    bounds = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M")]
    return next((name for bound, name in bounds if texts < bound), "n>1M")


def _yaml(text: str) -> str:
    """A double-quoted YAML string; everything but plain ASCII is written by number, so every reader reads the same."""
    return '"' + "".join(_yaml_character(c) for c in text) + '"'


def _yaml_character(character: str) -> str:
    number = ord(character)
    if 0x20 <= number < 0x7F and character not in '"\\':
        return character
    return f"\\U{number:08X}"


def _bibtex(text: str) -> str:
    return "".join(" " if c in "{}\\" else c for c in printable(text))
