"""One tree of errors, and the codes that stand for them on the wire.

A sentence in an exception is for the person at *this* machine: it names what was wrong, where, the value and
what would be accepted. It may quote a document, so it never travels. What crosses the wire is the
`WireCode` of the exception's class and nothing else (Flower by itself forwards ``str(exception)``).
"""

from __future__ import annotations

from enum import IntEnum


class WireCode(IntEnum):
    """Every refusal a site can send. The number and its name are all that leaves the site."""

    INTERNAL = 1001
    NOT_CONFIGURED = 1002
    UNKNOWN_PROTOCOL = 1003
    BAD_REQUEST = 1004
    WRONG_TIER = 1005
    MISSING_EXTRA = 1006
    REFUSED_BY_POLICY = 1007
    BUDGET_EXCEEDED = 1008
    CONFLICT = 1009
    LEDGER_UNUSABLE = 1010
    DATA_UNUSABLE = 1011
    MODEL_UNUSABLE = 1012
    ADAPTER_MISMATCH = 1013
    AWAITING_APPROVAL = 1014
    LEDGER_RESTORED = 1015


class ExitCode(IntEnum):
    """Exit codes of the command line (DESIGN section 6)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    BUDGET = 4


class FedcorpusError(Exception):
    """Root of all errors that this project raises on purpose."""

    wire_code = WireCode.INTERNAL
    exit_code = ExitCode.FAILED


class UserError(FedcorpusError, ValueError):
    """Something a person wrote or pointed to can't be used; nothing was spent."""

    wire_code = WireCode.NOT_CONFIGURED
    exit_code = ExitCode.USAGE


class StudyError(UserError):
    """A study file that can't be read, or that contradicts itself."""

    wire_code = WireCode.BAD_REQUEST


class SiteConfigError(UserError):
    """A site file that can't be read."""


class DataError(UserError):
    """Documents that can't be read, or too few of them."""

    wire_code = WireCode.DATA_UNUSABLE


class ModelError(UserError):
    """A model folder, package or identifier that can't be loaded."""

    wire_code = WireCode.MODEL_UNUSABLE


class MissingExtraError(UserError, ImportError):
    """A library that this task needs isn't installed here."""

    wire_code = WireCode.MISSING_EXTRA


class ProtocolError(FedcorpusError, ValueError):
    """A message that isn't what the protocol says."""

    wire_code = WireCode.BAD_REQUEST


class UnknownProtocolError(ProtocolError):
    """A message of a protocol version that this install doesn't speak."""

    wire_code = WireCode.UNKNOWN_PROTOCOL


class WrongTierError(ProtocolError):
    """A request that this site's tier doesn't answer."""

    wire_code = WireCode.WRONG_TIER


class AdapterMismatchError(ProtocolError):
    """An adapter whose names, shapes or frozen part differ from what the study says."""

    wire_code = WireCode.ADAPTER_MISMATCH


class PolicyRefusal(FedcorpusError, PermissionError):
    """This site's policy doesn't allow the request."""

    wire_code = WireCode.REFUSED_BY_POLICY
    exit_code = ExitCode.REFUSED


class BudgetExceededError(PolicyRefusal):
    """The request would take the site past its privacy cap."""

    wire_code = WireCode.BUDGET_EXCEEDED
    exit_code = ExitCode.BUDGET


class AwaitingApprovalError(PolicyRefusal):
    """A person of this site hasn't agreed to the study yet."""

    wire_code = WireCode.AWAITING_APPROVAL


class LedgerError(FedcorpusError, RuntimeError):
    """The ledger can't be read, written or trusted: nothing may be released."""

    wire_code = WireCode.LEDGER_UNUSABLE


class ConflictError(LedgerError):
    """A request id that the ledger knows, with other content."""

    wire_code = WireCode.CONFLICT


class LedgerRestoredError(LedgerError):
    """The ledger is an older copy than one that was seen, or another one: what was spent is unknown."""

    wire_code = WireCode.LEDGER_RESTORED


class PrivacyError(FedcorpusError, ValueError):
    """Privacy parameters that have no valid meaning, or no solution."""

    wire_code = WireCode.BAD_REQUEST
    exit_code = ExitCode.USAGE


class QuorumError(FedcorpusError, RuntimeError):
    """Fewer sites answered than the study requires."""


class GenerationError(FedcorpusError, RuntimeError):
    """The generator gave nothing usable."""


class CheckpointError(UserError):
    """A run folder whose state is missing, damaged or another study's."""


class BundleError(FedcorpusError, RuntimeError):
    """A corpus bundle that can't be written."""


class FederationError(FedcorpusError, RuntimeError):
    """A Flower process didn't start, died, or a run failed."""
