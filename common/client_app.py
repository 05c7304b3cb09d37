"""The app's one ClientApp (Flower allows one per app): hands a message to this site's tier, and lets no text out.

The tier's module is imported by name when it is needed, so a weak site never loads torch, and a strong site never loads
the weak tier. Whatever goes wrong, what crosses the wire is a `WireCode`: Flower by itself would forward the text of
the exception, and that may quote a note.
"""

from __future__ import annotations

import logging
import traceback
from importlib import import_module

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from common.errors import FedcorpusError, WireCode, WrongTierError
from common.logs import log_to_stderr
from common.protocol import CENSUS, PROFILE_AND_VOTE, TRAIN, CensusRequest
from common.site.config import Site
from common.site.door import Door
from common.site.locate import load_site

log = logging.getLogger("fedcorpus.site")

_TIER_OF = {TRAIN: "strong", PROFILE_AND_VOTE: "weak"}


class TierDispatcher(ClientApp):
    """Routes by the tier that the hospital chose in its ``site.toml``."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer, or send a code. Never raises."""
        log_to_stderr()
        try:
            return _route(message, context)
        except FedcorpusError as error:
            code, said = error.wire_code, f"refused: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, only a code may leave
            code, said = WireCode.INTERNAL, f"failed: {_where(error)}"
        # Not above: a log that can't be written prints the exception that is being handled, with its text.
        log.error("%s %s", message.metadata.message_type, said)
        return _coded(message, code)


def _route(message: Message, context: Context) -> Message:
    site = load_site(context)
    asked = message.metadata.message_type
    if asked == CENSUS:
        reply = Door(site).census(CensusRequest.from_records(message.content))
        return Message(reply.to_records(), reply_to=message)
    _check_tier(site, asked)
    tier = import_module(f"client_{site.tier}.client_app")
    answer: Message = tier.app(message, context)
    return answer


def _where(error: Exception) -> str:
    """An exception's class and its way through the code, without its text: that may quote a note, and logs travel."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join([type(error).__name__, *(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(frames))])


def _check_tier(site: Site, asked: str) -> None:
    if _TIER_OF.get(asked) != site.tier:
        raise WrongTierError(f"site {site.name!r} is {site.tier!r} and doesn't answer {asked!r}")


def _coded(message: Message, code: WireCode) -> Message:
    return Message(Error(code=int(code), reason=code.name), reply_to=message)


app = TierDispatcher()
