"""How good and how safe a corpus is: utility, fidelity and leakage, each number with the range to read it in.

What a number is made of are functions on arrays and texts (`utility`, `distances`, `mauve`, `surface`, `leakage`, …);
what is measured, against what, is a measure (`measures`); `evaluate` runs all of them:

    quality = evaluate(Material(corpus, test, train, holdout, floor, options, vectors))

An evaluation sees documents without any noise. On private ones it is itself a release: it is for public or test data,
and at a site for its operator only.
"""
