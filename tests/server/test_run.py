"""The whole algorithm in one process: real ServerApp, real ClientApps, real wire format, tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

from common.client_app import app as client_app
from common.errors import QuorumError
from common.models.generator import Generator
from common.models.manifest import manifest_of_base
from common.protocol import CENSUS, PROFILE_AND_VOTE, TRAIN, LedgerHead, pack_release, release_records
from common.site.config import Site
from common.site.ledger import Ledger
from common.site.plan import weak_plan
from server.aggregate import combined_sizes, quotas, sum_profiles
from server.census import CAPPED
from server.corpus import read_ballots, read_corpus, read_pool, read_profiles
from server.html_report import write_html_report
from server.html_report.material import read_material
from server.server_app import Run, open_run, run_study
from server.summary import read_summary
from tests.hospitals import rows, small_study, write_site, write_study
from tests.in_process import InProcessGrid

HEAD = LedgerHead("a" * 32, 1, "b" * 64)
TIERS = {1: ("north", "strong"), 2: ("south", "strong"), 3: ("east", "weak"), 4: ("west", "weak")}


def _hospitals(folder: Path, **extra: str) -> dict[int, Path]:
    return {
        node: write_site(folder, name, tier, rows(40, 40 * node), extra.get(name, ""))
        for node, (name, tier) in TIERS.items()
    }


def _run(folder: Path, base: Path, grid: InProcessGrid, **changes: Mapping[str, Any]) -> Run:
    run = open_run(str(write_study(folder, small_study(base, **changes))), str(folder / "run"))
    run_study(grid, run)
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Run, InProcessGrid, dict[int, Path]]:
    folder = tmp_path_factory.mktemp("finished")
    sites = _hospitals(folder)
    grid = InProcessGrid(sites)
    return _run(folder, tiny_model, grid), grid, sites


def test_code_proportions_equal_the_noisy_sizes_to_rounding(finished: Any) -> None:
    run, _, _ = finished
    texts = read_corpus(run.workspace, run.study.codes)
    made = np.bincount([text.code for text in texts], minlength=len(run.study.codes))
    profiles, ballots = read_profiles(run.workspace.profiles), read_ballots(run.workspace.ballots)
    strong = [profile for name, profile in profiles.items() if name not in ballots]
    plan = weak_plan(run.study)
    weak = combined_sizes(
        sum_profiles([profiles[name] for name in ballots]),
        sum_profiles(list(ballots.values())),
        read_pool(run.workspace.pool).codes,
        votes_per_unit=run.study.votes_per_unit,
        profile_variance=len(ballots) * plan.profile.scale**2,
        vote_variance=len(ballots) * plan.votes.scale**2,
    )
    sizes = sum_profiles([*strong, weak])
    assert made.tolist() == quotas(sizes, run.study.corpus.size).tolist()
    assert len(texts) == run.study.corpus.size
    exact = np.maximum(sizes, 0) / np.maximum(sizes, 0).sum() * run.study.corpus.size
    assert np.abs(made - exact).max() < 1


def test_the_report_follows_the_quotas_and_holds_nothing_of_a_document(finished: Any, tmp_path: Path) -> None:
    run, _, _ = finished
    material = read_material(run.workspace)
    assert quotas(material.sizes, run.study.corpus.size).tolist() == [code.wanted for code in material.summary.codes]
    html = write_html_report(run.workspace, tmp_path / "report.html").read_text(encoding="utf-8")
    assert not any(row["text"] in html for node in TIERS for row in rows(40, 40 * node))


def test_every_text_is_a_candidate_or_a_top_up_of_its_code(finished: Any) -> None:
    run, _, _ = finished
    pool = read_pool(run.workspace.pool)
    candidates = set(zip(pool.texts, pool.codes.tolist(), strict=True))
    origins = Counter()
    for text in read_corpus(run.workspace, run.study.codes):
        origins[text.origin] += 1
        assert ((text.text, text.code) in candidates) == (text.origin == "candidate")
    assert origins["candidate"] > 0
    assert origins["repeat"] == 0


def test_every_site_gets_one_question_per_round_and_weak_sites_just_one(finished: Any) -> None:
    run, grid, _ = finished
    asked = Counter((m.metadata.dst_node_id, m.metadata.message_type) for m in grid.sent)
    for node, (_, tier) in TIERS.items():
        assert asked[node, TRAIN] == (run.study.training.rounds if tier == "strong" else 0)
        assert asked[node, PROFILE_AND_VOTE] == (1 if tier == "weak" else 0)
    votes = [m for m in grid.received if m.metadata.message_type == PROFILE_AND_VOTE]
    assert len(votes) == 2
    assert all(set(m.content) == {"release", "ledger"} for m in votes), "profile and ballot in one message"


def test_only_the_adapter_travels_in_phase_1(finished: Any) -> None:
    run, grid, _ = finished
    generator = Generator(run.study.generator)
    for message in grid.sent:
        if message.metadata.message_type == TRAIN:
            assert set(message.content["adapter"]) == set(generator.trained)
            assert all("lora_B" in name for name in message.content["adapter"])


def test_each_site_was_charged_once_and_at_most_the_studys_promise(finished: Any) -> None:
    run, _, sites = finished
    for file in sites.values():
        epsilon, delta = Ledger(Site.load(file).ledger_path).spent()
        assert 0.95 * run.study.privacy.epsilon < epsilon <= run.study.privacy.epsilon
        assert delta == run.study.privacy.delta
    summary = read_summary(run.workspace)
    assert summary.epsilon <= run.study.privacy.epsilon
    assert {s.outcome for s in summary.sites} == {"answered"}


def test_the_adapter_moved_is_finite_and_reloads_with_equal_logits_in_a_fresh_process(finished: Any) -> None:
    run, _, _ = finished
    code = (
        "import sys, torch\nfrom common.models.generator import load_saved\nfrom pathlib import Path\n"
        "model = load_saved(sys.argv[1], Path(sys.argv[2])).eval()\n"
        "with torch.no_grad(): logits = model(input_ids=torch.arange(1, 20)[None]).logits\n"
        "torch.save({'logits': logits, 'moved': max(p.abs().max().item() for n, p in model.named_parameters() "
        "if 'lora_B' in n)}, sys.argv[3])\n"
    )
    arguments = [run.study.generator.base, str(run.workspace.adapter)]
    results = []
    import torch

    for name in ("one", "two"):
        out = run.workspace.root / f"{name}.pt"
        subprocess.run([sys.executable, "-c", code, *arguments, str(out)], check=True, capture_output=True)
        results.append(torch.load(out))
    in_memory = Generator(run.study.generator)
    untrained = in_memory.model.eval()(input_ids=torch.arange(1, 20)[None]).logits
    from safetensors.torch import load_file

    weights = load_file(run.workspace.adapter / "adapter_model.safetensors")
    trained = {name.replace(".weight", ".default.weight"): w.numpy() for name, w in weights.items() if "lora_B" in name}
    in_memory.load_adapter(trained)
    expected = in_memory.model.eval()(input_ids=torch.arange(1, 20)[None]).logits
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert results[0]["moved"] > 0
    assert torch.equal(results[0]["logits"], results[1]["logits"])
    assert torch.allclose(results[0]["logits"], expected, atol=1e-6)
    assert not torch.allclose(expected, untrained, atol=1e-6)


def test_nothing_of_any_document_is_in_the_run_folder_or_on_the_wire(finished: Any) -> None:
    run, grid, sites = finished
    secrets = [row["text"].encode() for node in TIERS for row in rows(40, 40 * node)]
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    traffic = b"".join(o.deflate() for m in grid.received for o in get_all_nested_objects(m).values())
    kept = b"".join(p.read_bytes() for p in run.workspace.root.rglob("*") if p.is_file())
    ledgers = b"".join(p.read_bytes() for f in sites.values() for p in Site.load(f).state.iterdir())
    for where in (traffic, kept, ledgers):
        assert not any(secret in where for secret in secrets)


def test_a_lost_site_costs_its_contribution_and_is_named(tmp_path: Path, tiny_model: Path) -> None:
    sites = _hospitals(tmp_path)
    Site.load(sites[2]).documents.path.write_bytes(b"damaged")
    grid = InProcessGrid(sites, offline={4: 99})
    grid_census = grid._offline.pop(4)

    def offline_after_census(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PROFILE_AND_VOTE and context.node_id == 4:
            grid._offline[4] = grid_census
            return grid._reply(message)
        return client_app(message, context)

    grid._answer = offline_after_census
    run = _run(tmp_path, tiny_model, grid)
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes == {"north": "answered", "south": "DATA_UNUSABLE", "east": "answered", "west": "FLOWER_ERROR_5"}
    assert set(read_profiles(run.workspace.profiles)) == {"north", "east"}
    assert len(read_corpus(run.workspace, run.study.codes)) == run.study.corpus.size


def test_sites_that_time_out_cost_their_contribution_and_are_named(tmp_path: Path, tiny_model: Path) -> None:
    grid = InProcessGrid(_hospitals(tmp_path), silent={TRAIN: 2, PROFILE_AND_VOTE: 4})
    run = _run(tmp_path, tiny_model, grid, federation={"vote_seconds": 2.0})
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes == dict.fromkeys(("south", "west"), "no answer in time") | dict.fromkeys(
        ("north", "east"), "answered"
    )


def test_a_site_that_is_lost_during_the_census_is_asked_again(tmp_path: Path, tiny_model: Path) -> None:
    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), offline={3: 1}))
    assert {s.outcome for s in read_summary(run.workspace).sites} == {"answered"}


@pytest.mark.parametrize("name", ["[red]x[/red]", "../../etc", "a\nb", "x" * 65])
def test_a_site_cannot_choose_a_name_that_does_things(tmp_path: Path, tiny_model: Path, name: str) -> None:
    def hostile(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == CENSUS and context.node_id == 4:
            reply.content["reply"]["name"] = name
        return reply

    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), answer=hostile))
    names = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert names["node-4"] == "refused: malformed census reply"


def test_a_site_that_comes_back_is_asked_again_and_charged_once(tmp_path: Path, tiny_model: Path) -> None:
    """Its answer is lost on the way once; the second time the ledger gives the same bytes."""
    sites = _hospitals(tmp_path)
    lost: list[Message] = []

    def lose_the_first_vote(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == PROFILE_AND_VOTE and context.node_id == 3 and not lost:
            lost.append(reply)
            grid._offline[3] = 1
            return grid._reply(message)
        return reply

    grid = InProcessGrid(sites, answer=lose_the_first_vote)
    run = _run(tmp_path, tiny_model, grid)
    given = [m for m in grid.received if m.metadata.src_node_id == 3 and m.has_content() and "release" in m.content]
    assert len(given) == 1
    assert given[0].content["release"]["bytes"].data == lost[0].content["release"]["bytes"].data
    assert Ledger(Site.load(sites[3]).ledger_path).spent()[0] <= run.study.privacy.epsilon
    assert {s.outcome for s in read_summary(run.workspace).sites} == {"answered"}


@pytest.mark.parametrize(
    "forged",
    [
        {"profile": np.zeros(4, np.int64), "ballot": np.zeros(3, np.int64)},
        {"profile": np.zeros(4, np.float64), "ballot": np.zeros(24, np.int64)},
        {"ballot": np.zeros(24, np.int64)},
    ],
)
def test_a_malformed_ballot_is_dropped_and_the_site_named(
    tmp_path: Path, tiny_model: Path, forged: dict[str, np.ndarray]
) -> None:
    def hostile(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PROFILE_AND_VOTE and context.node_id == 4:
            return Message(release_records(pack_release(forged), HEAD), reply_to=message)
        return client_app(message, context)

    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), answer=hostile))
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes["west"] == "malformed ballot"
    assert outcomes["east"] == "answered"


@pytest.mark.parametrize("value", [10**6, -(10**6), np.iinfo(np.int64).max], ids=str)
def test_a_stuffed_ballot_is_capped_and_the_site_named(tmp_path: Path, tiny_model: Path, value: int) -> None:
    def hostile(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PROFILE_AND_VOTE and context.node_id == 4:
            stuffed = {"profile": np.array([40, 0, 0, 0]), "ballot": np.full(24, value)}
            return Message(release_records(pack_release(stuffed), HEAD), reply_to=message)
        return client_app(message, context)

    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), answer=hostile))
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes["west"] == CAPPED
    assert outcomes["east"] == "answered"
    ballots = read_ballots(run.workspace.ballots)
    assert np.abs(ballots["west"]).max() < 200
    assert len(read_corpus(run.workspace, run.study.codes)) == run.study.corpus.size


def test_a_weak_site_that_shows_up_while_others_vote_is_heard(tmp_path: Path, tiny_model: Path) -> None:
    sites = _hospitals(tmp_path)

    class Late(InProcessGrid):
        """West comes online when east has the question."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if any(m.metadata.message_type == PROFILE_AND_VOTE for m in messages) and 4 not in self.contexts:
                self.contexts[4] = InProcessGrid({4: sites[4]}).contexts[4]
                # East is lost once, so that the window stays open.
                self._offline[3] = 1
            return super().push_messages(messages)

    grid = Late({node: file for node, file in sites.items() if node != 4})
    run = _run(tmp_path, tiny_model, grid, federation={"expected_sites": 3, "census_seconds": 1})
    assert {site.name: site.outcome for site in read_summary(run.workspace).sites} == dict.fromkeys(
        ("north", "south", "east", "west"), "answered"
    )
    assert set(read_ballots(run.workspace.ballots)) == {"east", "west"}


def test_a_poisoned_adapter_is_dropped_and_the_site_named(tmp_path: Path, tiny_model: Path) -> None:
    def hostile(message: Message, context: Context) -> Message:
        if message.metadata.message_type != TRAIN or context.node_id != 2:
            return client_app(message, context)
        adapter = {f"adapter/{n}": np.full_like(a.numpy(), np.nan) for n, a in message.content["adapter"].items()}
        return Message(release_records(pack_release(adapter), HEAD), reply_to=message)

    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), answer=hostile))
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes["south"] == "malformed adapter"


def test_without_a_quorum_the_run_ends_and_says_who_was_missing(tmp_path: Path, tiny_model: Path) -> None:
    sites = _hospitals(tmp_path)
    for node in (1, 2):
        Site.load(sites[node]).documents.path.write_bytes(b"damaged")
    with pytest.raises(QuorumError, match=r"round 1: 0 strong sites answered.*north \(DATA_UNUSABLE\)"):
        _run(tmp_path, tiny_model, InProcessGrid(sites))
    assert not (tmp_path / "run" / "corpus.jsonl").exists()


def test_a_site_whose_policy_refuses_takes_no_part_and_is_charged_nothing(tmp_path: Path, tiny_model: Path) -> None:
    sites = _hospitals(tmp_path, west="max_epsilon_per_study = 1.0\n")
    run = _run(tmp_path, tiny_model, InProcessGrid(sites))
    summary = {site.name: site for site in read_summary(run.workspace).sites}
    assert summary["west"].outcome == "refused: BUDGET_EXCEEDED"
    assert summary["west"].epsilon is None
    assert Ledger(Site.load(sites[4]).ledger_path).spent() == (0, 0)


def _restore_before(
    kind: str, node: int, sites: Mapping[int, Path], *, echoed: bool = True
) -> tuple[InProcessGrid, Path]:
    """A grid in which a site's ledger is put back to a copy made at the census, before its second ``kind``."""
    ledger = Site.load(sites[node]).ledger_path
    copy = ledger.parent.with_name("backup")
    asked: list[str] = []

    def answer(message: Message, context: Context) -> Message:
        if context.node_id != node:
            return client_app(message, context)
        asked.append(message.metadata.message_type)
        if asked.count(kind) == 2 and asked[-1] == kind:
            shutil.rmtree(ledger.parent)
            shutil.copytree(copy, ledger.parent)
        if not echoed and "seen" in message.content:
            del message.content["seen"]
        reply = client_app(message, context)
        if message.metadata.message_type == CENSUS:
            shutil.copytree(ledger.parent, copy, dirs_exist_ok=True)
        return reply

    return InProcessGrid(sites, answer=answer), ledger


def test_a_ledger_restored_from_an_old_copy_releases_nothing(tmp_path: Path, tiny_model: Path) -> None:
    sites = _hospitals(tmp_path)
    grid, ledger = _restore_before(TRAIN, 1, sites)
    run = _run(tmp_path, tiny_model, grid)
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes["north"] == "LEDGER_RESTORED"
    assert Ledger(ledger).spent() == (0, 0), "the old copy knows of no charge, and gave nothing out"


def test_without_the_coordinators_echo_a_restored_copy_would_be_charged_anew(tmp_path: Path, tiny_model: Path) -> None:
    """Twin."""
    sites = _hospitals(tmp_path)
    grid, _ = _restore_before(TRAIN, 1, sites, echoed=False)
    run = _run(tmp_path, tiny_model, grid)
    assert {site.outcome for site in read_summary(run.workspace).sites} == {"answered"}


def test_a_ledger_that_is_older_than_in_an_earlier_run_is_refused_at_the_census(
    tmp_path: Path, tiny_model: Path
) -> None:
    sites = _hospitals(tmp_path)
    state = Site.load(sites[4]).state
    heads = str(tmp_path / "coordinator")

    def run(name: str, grid: InProcessGrid) -> dict[str, str]:
        study = write_study(tmp_path, small_study(tiny_model, training={"rounds": 1}, privacy={"epsilon": 2.0}))
        opened = open_run(str(study), str(tmp_path / name), heads)
        run_study(grid, opened)
        return {site.name: site.outcome for site in read_summary(opened.workspace).sites}

    assert run("one", InProcessGrid(sites))["west"] == "answered"
    shutil.copytree(state, tmp_path / "backup")
    assert run("two", InProcessGrid(sites))["west"] == "answered"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    assert run("three", InProcessGrid(sites))["west"] == "refused: its ledger is an older copy than one seen before"


def test_a_node_key_registered_under_another_name_is_not_believed(tmp_path: Path, tiny_model: Path) -> None:
    names = {1: "north", 2: "south", 3: "east", 4: "somebody-else"}
    run = _run(tmp_path, tiny_model, InProcessGrid(_hospitals(tmp_path), names=names))
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes["west"] == "refused: its node key is registered under another name"


@pytest.mark.parametrize(
    "corpus",
    [{"selection": "weighted"}, {"selection": "paper"}, {"selection": "uniform"}, {"smoothing": "kernel"}],
    ids=str,
)
def test_every_selection_rule_fills_every_quota(tmp_path: Path, tiny_model: Path, corpus: dict[str, str]) -> None:
    grid = InProcessGrid(_hospitals(tmp_path))
    run = _run(tmp_path, tiny_model, grid, corpus=corpus)
    texts = read_corpus(run.workspace, run.study.codes)
    assert len(texts) == run.study.corpus.size


def test_patient_units_plain_lora_and_profile_weights_run_too(tmp_path: Path, tiny_model: Path) -> None:
    run = _run(
        tmp_path,
        tiny_model,
        InProcessGrid(_hospitals(tmp_path)),
        privacy={"unit": "patient", "codes_per_unit": 2},
        generator={"lora": "plain"},
        training={"weights": "noisy-profile", "optimizer": "sgd"},
        federation={"min_documents": 20},
    )
    adapter = Generator(run.study.generator).adapter()
    assert any("lora_A" in name for name in adapter)
    assert {s.outcome for s in read_summary(run.workspace).sites} == {"answered"}


def test_documents_of_several_topics_count_under_each(tmp_path: Path, tiny_model: Path) -> None:
    def listed(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"topic": ["staff", "parking"] if row["tone"] == 1 else [row["topic"]]}

    sites = {
        node: write_site(tmp_path, name, tier, list(map(listed, rows(400, 400 * node))))
        for node, (name, tier) in TIERS.items()
    }
    topic, tone = small_study(tiny_model)["codes"]["attributes"]
    run = _run(
        tmp_path,
        tiny_model,
        InProcessGrid(sites),
        codes={"attributes": [topic | {"multiple": True}, tone]},
        privacy={"codes_per_unit": 2},
    )
    profile = sum(read_profiles(run.workspace.profiles).values())
    # Every tone-1 document counts under both topics: 1,600 documents, 2,400 times under a code.
    np.testing.assert_allclose(profile, [800, 800 * 2 / 3, 800, 800 / 3], atol=80)
    assert len(read_corpus(run.workspace, run.study.codes)) == run.study.corpus.size


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "bart", "t5"])
def test_other_kinds_of_models_run_too(tmp_path: Path, tiny: Callable[[str], Path], kind: str) -> None:
    base = tiny(kind)
    pinned = {"sha256": manifest_of_base(str(base)).digest, "target_modules": "attention"}
    run = _run(tmp_path, base, InProcessGrid(_hospitals(tmp_path)), generator=pinned)
    assert {s.outcome for s in read_summary(run.workspace).sites} == {"answered"}
    assert len(read_corpus(run.workspace, run.study.codes)) == run.study.corpus.size


def test_a_site_whose_copy_of_the_model_differs_by_a_byte_takes_no_part(tmp_path: Path, tiny_model: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "model")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    sites = _hospitals(tmp_path)
    file = sites[1]
    file.write_text(file.read_text() + f'[models]\n"{tiny_model}" = "{copy}"\n')
    pinned = {"sha256": manifest_of_base(str(tiny_model)).digest}
    run = _run(tmp_path, tiny_model, InProcessGrid(sites), generator=pinned)
    outcomes = {site.name: site.outcome for site in read_summary(run.workspace).sites}
    assert outcomes == {"north": "MODEL_UNUSABLE", "south": "answered", "east": "answered", "west": "answered"}
    with Ledger.of(Site.load(file)) as ledger:
        assert ledger.spent() == (0, 0)


def test_a_run_folder_is_used_once(finished: Any, tmp_path: Path) -> None:
    run, _, _ = finished
    study = tmp_path / "study.toml"
    study.write_text("")
    with pytest.raises(Exception, match="study"):
        open_run(str(study), str(run.workspace.root))


def test_progress_is_on_record(finished: Any) -> None:
    run, _, _ = finished
    events = [json.loads(line) for line in run.workspace.progress.read_text().splitlines()]
    done = [event["phase"] for event in events if event["event"] == "phase-done"]
    assert done == ["census", "training", "pool", "votes", "corpus"]
