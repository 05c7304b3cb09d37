"""Experiments: many small studies on public text, with their baselines, and the tables that compare them.

An experiment is data (`plan`): real documents, how they are shared out to sites (`partition`), and a grid of cells.
A cell is one way to make a corpus: a chain of steps (`chain`) that ends with a judgement. Every step's result is kept
under a hash of what it depends on (`cache`), so cells share what they have in common and a run that was killed goes on.
`runner` decides what is done next; `tables` and `plot` show what came of it.

Privacy is the real thing: wherever a cell has an epsilon, real sites answer through their real doors, with ledgers and
noise of their own (`federation`). What has none, such as training without noise, is marked so; it is for public text.

    experiment = Experiment.load(Path("table12.toml"))
    Runner(experiment, Path("data"), Path("out"), Cache(Path("out/cache"))).run()
"""
