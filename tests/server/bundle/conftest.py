"""One finished run, and one bundle of it, for all tests of bundles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.site.config import Site
from common.site.ledger import Ledger
from server.bundle.write import write_bundle
from server.server_app import open_run, run_study
from tests.hospitals import rows, small_study, write_site, write_study
from tests.in_process import InProcessGrid
from tests.server.bundle.finished import PRIVACY, PUBLICATION, SITES, Finished


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Finished:
    """A study of one strong and one weak site, run to its end."""
    folder = tmp_path_factory.mktemp("finished")
    sites = {
        node: write_site(folder, name, tier, rows(40, 40 * node)) for node, (name, tier) in enumerate(SITES.items(), 1)
    }
    study = small_study(tiny_model, federation={"expected_sites": 2}, training={"rounds": 1}) | {"privacy": PRIVACY}
    run = open_run(str(write_study(folder, study)), str(folder / "run"))
    run_study(InProcessGrid(sites), run)
    ledgers = folder / "ledgers"
    ledgers.mkdir()
    for file in sites.values():
        site = Site.load(file)
        with Ledger.of(site) as ledger:
            (ledgers / f"{site.name}.json").write_text(json.dumps(ledger.export(site.name)))
    return Finished(folder / "run", ledgers)


@pytest.fixture(scope="session")
def key() -> Ed25519PrivateKey:
    """The publisher's signing key."""
    return Ed25519PrivateKey.generate()


@pytest.fixture(scope="session")
def bundle(finished: Finished, key: Ed25519PrivateKey, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed bundle of three shards. Not to be changed."""
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(finished.run, out, PUBLICATION, key, rows_per_shard=8)
    return out


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))
