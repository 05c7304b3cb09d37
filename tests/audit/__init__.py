"""Privacy audits: an adversary plays against the mechanisms as they ship and measures how much they really give away.

A proof says epsilon is at most what is claimed; an audit says it is at least what an attack achieved. A claim below
that is refuted. Each audit has twins with a protection switched off, which must be refuted: an audit that can't see
them shows nothing. ``make audit`` runs all of them and prints one table; `tests/audit/test_audit.py` runs smaller ones.

What an audit can't see: a loss of privacy smaller than its statistical error, or one that its attack doesn't use.
"""
