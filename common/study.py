"""The study: the whole plan, fixed and hashed before any data is touched.

Every number that privacy depends on is here, so that it is public and the same for all sites. A site computes its
noise from this file and its own size class; it never takes a noise scale from the server. Options have their default
and their description here and nowhere else: command line help and documentation read these fields.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from common.codes import ControlCodes
from common.configuration import NAME, Section, first_problem, load_model
from common.errors import StudyError

MOST_STEPS = 1_000_000
"""Steps of a study: planning the noise of so many takes a site twenty seconds and 300 MB."""

MOST_CANDIDATES = 1_000_000
"""Of a pool: a weak site holds a text, a vector and a vote of each."""


class Privacy(Section):
    """The promise: one joint (epsilon, delta) per site for everything this study releases from it.

    Of epsilon, delta and a tier's noise two are given and the third is solved; if all are given they are checked.
    """

    epsilon: float | None = Field(
        default=None, gt=0, description="Joint epsilon of all of a site's releases in this study; unset means solved."
    )
    delta: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Joint delta; a public constant, well below 1 / units of the largest site. Unset means solved.",
    )
    training_noise_multiplier: float | None = Field(
        default=None, gt=0, description="Standard deviation of the training noise over C; unset means solved."
    )
    vote_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Scale of the vote noise over the square root of votes a unit; unset means solved.",
    )
    accounting: Literal["joint", "paper"] = Field(
        default="joint",
        description="How a site's releases are composed. joint: all at once, least noise. paper: epsilon and delta are "
        "split between the profile and the rest, and added.",
    )
    unit: Literal["record", "patient"] = Field(
        default="record", description="What one person's protection means. Adjacency is add/remove one unit."
    )
    profile_share: float = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="Joint accounting: share of the squared signal (Gaussian-DP mu^2) that the profile takes; 0.02 "
        "adds about 1 % noise to what the rest of the budget pays for.",
    )
    paper_profile_share: float = Field(
        default=0.05, gt=0, lt=1, description="The paper's accounting: share of epsilon that the profile takes."
    )
    codes_per_unit: int = Field(
        default=1,
        ge=1,
        description="c: at most this many distinct codes of one unit count in the profile, and a document of several "
        "codes counts under so many of them.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="C: per-unit gradients are clipped to this L2 norm.")

    @model_validator(mode="after")
    def _two_of_three(self) -> Privacy:
        noise = (self.training_noise_multiplier, self.vote_noise_multiplier)
        promised = [name for name in ("epsilon", "delta") if getattr(self, name) is not None]
        if len(promised) == 1 and None in noise:
            missing = "delta" if promised == ["epsilon"] else "epsilon"
            raise ValueError(
                f"{missing} is missing; give epsilon and delta, or one of them with training_noise_multiplier and "
                f"vote_noise_multiplier"
            )
        if not promised:
            raise ValueError("epsilon is missing, and delta too; give both, or one of them with both noise multipliers")
        if self.accounting == "paper" and len(promised) == 1:
            raise ValueError("accounting 'paper' splits an epsilon and a delta; give both")
        return self


class Generator(Section):
    """The public language model and the adapter that is trained on top of it."""

    base: str = Field(
        description="The language model, causal or encoder-decoder: a folder in Hugging Face format (safetensors) or "
        "with a GGUF file, a hub id, or 'package:NAME' for a model that was installed as a Python package."
    )
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="Digest of the model's files, as 'fedcorpus manifest BASE' prints it; a model with another one is "
        "refused, at the sites and at the coordinator. Unset means that any model of that name is taken.",
    )
    rank: int = Field(default=8, ge=1, description="LoRA rank r.")
    alpha: float = Field(default=16.0, gt=0, description="LoRA scale alpha; the update is alpha / r * B A.")
    target_modules: tuple[str, ...] | Literal["all-linear", "attention"] = Field(
        default="all-linear",
        description="Linear layers that get an adapter: 'all-linear' (all but the output head), 'attention' (those "
        "that are usual for the model's family), or names.",
    )
    lora: Literal["ffa", "plain", "alternating"] = Field(
        default="ffa",
        description="Which factors of the adapter B A are trained. ffa (FFA-LoRA): only B, and A stays at its public "
        "initial value; the mean of the sites' adapters is exact and traffic is least. alternating (RoLoRA): B in odd "
        "rounds and A in even ones; exact too. plain: both at once; the mean of products isn't the product of means.",
    )
    init_seed: int = Field(default=0, ge=0, description="Public seed of the adapter's initial A. Not used for noise.")
    max_tokens: int = Field(
        default=128,
        ge=8,
        le=8192,
        description="Prompt and text together are cut to this many tokens in training.",
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="float32",
        description="Number format of the frozen base model; adapters are always float32. auto: each machine takes "
        "bfloat16 if it multiplies matrices faster in it, which it measures.",
    )


class ServerUpdate(Section):
    """The server's optimiser; the change that a round makes is its gradient (Reddi et al. 2021)."""

    optimizer: Literal["fedavg", "fedavgm", "fedadam"] = Field(
        default="fedavg",
        description="fedavg: the combined adapter is the next one. fedavgm: with momentum. fedadam: Adam.",
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="Of fedavgm, where unset means 1, and of fedadam, where it has to be given."
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Of fedavgm.")
    beta_1: float = Field(default=0.9, ge=0, lt=1, description="Of fedadam: decay of the first moment.")
    beta_2: float = Field(default=0.99, ge=0, lt=1, description="Of fedadam: decay of the second moment.")
    tau: float = Field(default=1e-3, gt=0, description="Of fedadam: added to the root of the second moment.")

    @model_validator(mode="after")
    def _adam_needs_a_rate(self) -> ServerUpdate:
        if self.optimizer == "fedadam" and self.learning_rate is None:
            raise ValueError(
                "optimizer is 'fedadam' and learning_rate is missing; give one of the size of what a round changes, "
                "such as training.learning_rate x training.steps"
            )
        return self


class Training(Section):
    """Phase 1: LoRA DP-FedAvg with the strong sites."""

    rounds: int = Field(default=3, ge=1, le=10_000, description="R: rounds of federated averaging.")
    steps: int = Field(default=10, ge=1, le=100_000, description="E: DP-SGD steps a site runs in each round.")
    batch_size: int = Field(
        default=64,
        ge=1,
        description="B: expected units in a Poisson batch; the sample rate is B / size class.",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate of the local optimiser.")
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Local optimiser.")
    keep_optimizer: bool = Field(
        default=True,
        description="Whether a site's local optimiser goes on in the next round with the moments it had; else it is "
        "fresh in every round.",
    )
    weights: Literal["equal", "noisy-profile"] = Field(
        default="equal",
        description="FedAvg weights: equal, or proportional to the totals of the noisy profiles. Both are public.",
    )
    aggregation: Literal["mean", "trimmed-mean"] = Field(
        default="mean",
        description="How adapters are combined. trimmed-mean: per weight, without the largest and smallest values; a "
        "few hostile or broken sites can't pull it away. Sites count equally then.",
    )
    trim: float = Field(
        default=0.2, ge=0, lt=0.5, description="Share of the sites that trimmed-mean leaves out at either end."
    )
    server: ServerUpdate = Field(default=ServerUpdate(), description="What the server does with the combined adapter.")

    @model_validator(mode="after")
    def _trimmed_sites_count_equally(self) -> Training:
        if self.aggregation == "trimmed-mean" and self.weights != "equal":
            raise ValueError(f"weights is {self.weights!r}, but trimmed-mean counts sites equally; use 'equal'")
        return self


class Pool(Section):
    """The candidate pool that the weak sites vote on."""

    size: int = Field(default=1000, ge=1, le=MOST_CANDIDATES, description="Number of candidates over all codes.")
    floor: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Share of the pool that is spread evenly over all codes, so that codes which only weak sites hold "
        "get candidates; the rest follows the strong sites' noisy profile.",
    )
    max_new_tokens: int = Field(default=64, ge=1, le=4096, description="Longest text, in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(default=0.95, gt=0, le=1, description="Nucleus sampling: probability mass kept.")
    batch_size: int = Field(default=32, ge=1, description="Texts generated at once.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Number format of the model that generates, adapter and all. auto: bfloat16 if the coordinator's "
        "machine multiplies matrices faster in it, which it measures; float32 else.",
    )
    max_tries: int = Field(
        default=4,
        ge=1,
        description="How often a text is made, at most, until one is kept. Dropped are empty texts, echoes of the "
        "prompt, exact duplicates, and what the next three options say.",
    )
    max_repetition: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Largest share of a text's 4-grams of words that occurred in it before; 1 keeps all texts.",
    )
    near_duplicate: float = Field(
        default=0.8,
        ge=0.3,
        le=1,
        description="How much two texts of a code may overlap (Jaccard, of runs of 5 characters, by MinHash) before "
        "the second is dropped as a near duplicate; 1 keeps all texts.",
    )
    over_long: Literal["keep", "drop"] = Field(
        default="keep",
        description="What happens to texts that max_new_tokens cuts before the model has ended them.",
    )
    seed: int = Field(default=0, ge=0, description="Public seed of the sampling at the server. Not used for noise.")


class Voting(Section):
    """Phase 2: one round with the weak sites."""

    neighbours: int | Literal["auto"] = Field(
        default="auto",
        description="K: candidates of the same code that one document votes for. 'auto' is min(8, pool / codes / 10).",
    )
    votes_per_unit: int | None = Field(
        default=None,
        ge=1,
        description="R: most votes of one unit, over all its documents and codes; more votes carry more noise. Unset "
        "means K, and so it is for a record of one code.",
    )
    embedder: str = Field(
        default="wordllama",
        description="Sentence embedder: 'wordllama' (static) or 'onnx:FOLDER-OR-FILE' (a transformer), both without "
        "torch; or 'sentence-transformers:FOLDER-OR-ID'.",
    )
    embedder_sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="Digest of the embedder's files, as 'fedcorpus manifest EMBEDDER' prints it; a site whose embedder "
        "has another one refuses. Unset means that any embedder of that name is taken.",
    )
    similarity: Literal["cosine", "l2", "inner"] = Field(
        default="cosine",
        description="What is nearest: the largest cosine, the least Euclidean distance, or the largest inner product.",
    )


class Corpus(Section):
    """What is published."""

    size: int = Field(default=400, ge=1, description="Number of synthetic texts in the corpus.")
    selection: Literal["density", "simplex", "weighted", "soft-threshold", "paper", "uniform"] = Field(
        default="density",
        description="How votes pick candidates. density: where votes are most beside those that the pool would give "
        "itself, no repeats; the coordinator needs the embedder. simplex: simplex-projected votes, highest first, no "
        "repeats. weighted: the same weights drawn without replacement. soft-threshold: votes less one standard "
        "deviation of their noise, drawn without replacement. paper: clip at 0, normalise, draw with replacement. "
        "uniform: ignore the votes.",
    )
    choice: float = Field(
        default=2.5,
        ge=1,
        le=100,
        description="With selection density: texts to choose from for each text of the corpus. A code with fewer "
        "candidates gets fresh texts as well, which the votes on candidates like them rank.",
    )
    smoothing: Literal["none", "kernel"] = Field(
        default="none",
        description="Whether votes are denoised by how alike candidates are before they pick. kernel: by a Gaussian "
        "process over the candidates' embeddings; gains where epsilon is about 1 and a code has hundreds of "
        "candidates. The coordinator needs the embedder.",
    )


class Federation(Section):
    """Who must be there, and how long the coordinator waits."""

    expected_sites: int = Field(default=2, ge=1, description="Sites the census waits for, until its deadline.")
    min_strong: int = Field(default=1, ge=1, description="Fewest strong sites that must answer a training round.")
    min_weak: int = Field(default=1, ge=0, description="Fewest weak sites that must answer the vote round.")
    min_documents: int = Field(
        default=100,
        ge=1,
        description="Fewest units a site must hold to take part; also the smallest size class.",
    )
    max_units: int = Field(
        default=1_000_000,
        ge=1,
        le=1_000_000_000,
        description="Most units a weak site counts for; what it claims or votes beyond that is capped and reported.",
    )
    census_seconds: float = Field(default=120.0, gt=0, description="Deadline of the census.")
    round_seconds: float = Field(default=3600.0, gt=0, description="Deadline of one training round.")
    vote_seconds: float = Field(default=3600.0, gt=0, description="How long the vote round stays open.")


class Study(Section):
    """The whole plan of a study (``study.toml``)."""

    name: str = Field(pattern=NAME, description="Short name; letters, digits, . _ -")
    codes: ControlCodes = Field(description="Control codes: public attributes and their values.")
    privacy: Privacy = Field(description="The privacy promise.")
    generator: Generator = Field(description="Language model and adapter.")
    training: Training = Field(default=Training(), description="Phase 1.")
    pool: Pool = Field(default=Pool(), description="Candidate pool.")
    voting: Voting = Field(default=Voting(), description="Phase 2.")
    corpus: Corpus = Field(default=Corpus(), description="The published corpus.")
    federation: Federation = Field(default=Federation(), description="Sites and deadlines.")

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Study:
        if self.pool.size < len(self.codes):
            raise ValueError(
                f"pool.size is {self.pool.size}, fewer than the {len(self.codes)} codes; at least one candidate per "
                f"code is needed"
            )
        if self.training.batch_size > self.federation.min_documents:
            raise ValueError(
                f"training.batch_size is {self.training.batch_size}, above federation.min_documents "
                f"({self.federation.min_documents}); the sample rate of the smallest site would exceed 1"
            )
        if self.training.rounds * self.training.steps > MOST_STEPS:
            steps = self.training.rounds * self.training.steps
            raise ValueError(f"training.rounds x training.steps is {steps}; at most {MOST_STEPS} can be planned")
        if self.pool.max_new_tokens > self.generator.max_tokens:
            raise ValueError(
                f"pool.max_new_tokens is {self.pool.max_new_tokens}, above generator.max_tokens "
                f"({self.generator.max_tokens}); the model would be asked for longer texts than it was trained on"
            )
        if self.federation.expected_sites < self.federation.min_strong + self.federation.min_weak:
            raise ValueError(
                f"federation.expected_sites is {self.federation.expected_sites}, fewer than min_strong + min_weak "
                f"({self.federation.min_strong} + {self.federation.min_weak})"
            )
        neighbours = self.voting.neighbours
        if isinstance(neighbours, int) and neighbours < 1:
            raise ValueError(f"voting.neighbours is {neighbours}; 'auto' or at least 1 is accepted")
        return self

    @model_validator(mode="after")
    def _units_and_codes_fit_together(self) -> Study:
        codes_per_unit, votes_per_unit = self.privacy.codes_per_unit, self.voting.votes_per_unit
        if self.codes.multiple and codes_per_unit == 1:
            raise ValueError(
                "privacy.codes_per_unit is 1, but documents may have several codes (codes.attributes: multiple); give "
                "the most that one counts under, at least 2"
            )
        if self.privacy.unit == "patient" or self.codes.multiple:
            return self
        if codes_per_unit != 1:
            raise ValueError(
                f"privacy.codes_per_unit is {codes_per_unit}, but a record has exactly one code; use 1, or declare an "
                "attribute as multiple"
            )
        if votes_per_unit not in (None, self.neighbours):
            raise ValueError(
                f"voting.votes_per_unit is {votes_per_unit}, but a record casts exactly K = {self.neighbours} votes; "
                "leave it out"
            )
        return self

    @cached_property
    def neighbours(self) -> int:
        """K, resolved. Fixed by public numbers alone, before any data is touched (facts: K <= J / 10, at most 8)."""
        if isinstance(self.voting.neighbours, int):
            return self.voting.neighbours
        return min(8, max(1, self.pool.size // (10 * len(self.codes))))

    @cached_property
    def votes_per_unit(self) -> int:
        """R, resolved."""
        return self.voting.votes_per_unit or self.neighbours

    @cached_property
    def canonical(self) -> str:
        """The study as canonical JSON: sorted keys, no blanks, defaults written out."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical form: the study's identity, in hexadecimal."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    @classmethod
    def from_canonical(cls, text: str) -> Study:
        """Read a study that came over the wire or out of a workspace.

        Raises
        ------
        StudyError
            If the text isn't a valid study.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise StudyError(f"study on the wire: {first_problem(error)}") from error

    @classmethod
    def load(cls, path: Path) -> Study:
        """Read ``study.toml``.

        Raises
        ------
        StudyError
            With one sentence that names the file, the field, the value and what would be accepted.
        """
        return load_model(cls, path, StudyError)
