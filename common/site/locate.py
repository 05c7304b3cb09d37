"""Which site file belongs to the ClientApp that is running."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context

from common.errors import SiteConfigError
from common.site.config import Site


def load_site(context: Context) -> Site:
    """The hospital names its own file in ``--node-config 'site="/path/site.toml"'``.

    Only in Flower's simulation, where a node has nothing but a partition number, does the run name a folder of site
    files. A node that has a site of its own never looks there: a coordinator can't choose a hospital's configuration.

    Raises
    ------
    SiteConfigError
    """
    own = context.node_config.get("site")
    if own is not None:
        return Site.load(Path(str(own)))
    partition = context.node_config.get("partition-id")
    folder = context.run_config.get("simulated-sites")
    if partition is None or not folder:
        raise SiteConfigError("this node has no site file; start it with --node-config 'site=\"/path/site.toml\"'")
    files = sorted(Path(str(folder)).glob("*.toml"))
    if int(partition) >= len(files):
        raise SiteConfigError(f"{folder}: holds {len(files)} site files; node {partition} of the simulation has none")
    return Site.load(files[int(partition)])
