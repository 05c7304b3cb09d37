"""The weak tier's ClientApp: one message in, one message out, with a noisy profile and a noisy ballot."""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_weak.embedding_cache import embed_documents
from client_weak.votes import noisy_ballot
from common.errors import PrivacyError
from common.models.embedder import load_embedder
from common.privacy.accounting import WeakPlan
from common.protocol import VoteRequest
from common.site.config import Site
from common.site.documents import Documents
from common.site.door import PROFILE, Answer, Compute, Door, Task
from common.site.locate import load_site
from common.site.profile import noisy_profile

log = logging.getLogger("fedcorpus.weak")

app = ClientApp()


@app.query("profile_and_vote")
def profile_and_vote(message: Message, context: Context) -> Message:
    """Answer the one request of phase 2, through the door."""
    site = load_site(context)
    request = VoteRequest.from_records(message.content)

    def prepare() -> Compute:
        return prepared(site, request)

    return Message(Door(site).release(request, prepare).to_records(), reply_to=message)


def prepared(site: Site, request: VoteRequest) -> Compute:
    """Read and embed the documents; what comes back computes the noisy profile and the noisy ballot."""
    study = request.study
    documents = Documents.load(site, study)
    embedder = load_embedder(study.voting, site.models)
    log.info("voting on %d candidates", len(request.pool))
    # The coordinator's texts first: should they be unusable, that is seen before the long part.
    pool_vectors = embedder.embed(request.pool.texts)
    vectors = embed_documents(site, study.voting, embedder, documents.texts)

    def compute(task: Task) -> Answer:
        plan = task.plan
        if not isinstance(plan, WeakPlan):
            raise PrivacyError(f"site {site.name!r}: a weak site's plan is needed, this is a {type(plan).__name__}")
        return Answer(
            {
                PROFILE: noisy_profile(documents, study, plan.profile),
                "ballot": noisy_ballot(documents, vectors, request.pool, pool_vectors, study, plan.votes),
            }
        )

    return compute
