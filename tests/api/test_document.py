"""The names in the published OpenAPI document, which generated clients make their methods of."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.app import create_app
from core.config import Settings
from tests.api.world import Api

OPERATION_IDS = """
    account_v1_account_get batches_v1_batches_get cancel_as_replicate_v1_predictions__id__cancel_post
    cancel_predictions__id__cancel_post cancel_v1_batches__id__cancel_post cancel_v1_jobs__id__cancel_post
    chat_v1_chat_completions_post complete_v1_completions_post content_v1_files__id__content_get
    content_v1_files__id__content_get_head create_of_model_v1_models__owner___name__predictions_post
    create_v1_batches_post create_v1_files_post create_v1_jobs_post create_v1_predictions_post
    delete_v1_files__id__delete delete_v1_jobs__id__delete draw__post draw_with_v1_models__name__post
    edit_v1_images_edits_post embed_v1_embeddings_post empty_v1_queues__name__cancel_post
    events_v1_jobs__id__events_get files_v1_files_get forget_v1_models__name__delete
    generate_v1_images_generations_post health_check_health_check_get
    healthz_healthz_get image_v1_jobs__id__images__k__get image_v1_jobs__id__images__k__get_head list_jobs_v1_jobs_get
    list_predictions_v1_predictions_get live_v2_health_live_get look_predictions__id__get look_v1_batches__id__get
    look_v1_files__id__get look_v1_jobs__id__get metrics_metrics_get model_ready_v2_models__name__ready_get
    model_v1_models__name__get model_v1_models__owner___name__get
    model_version_v1_models__owner___name__versions__id__get models_v1_models_get pause_v1_queues__name__pause_post
    predict_predictions_post preview_v1_jobs__id__preview_get put_predictions__id__put put_v1_jobs__id__put
    queues_v1_queues_get ready_v2_health_ready_get readyz_readyz_get requeue_v1_jobs__id__requeue_post
    respond_v1_responses_post
    resume_v1_queues__name__resume_post retrieve_v1_predictions__id__get secret_v1_webhooks_default_secret_get
    stream_v1_predictions__id__stream_get versions_v1_models__owner___name__versions_get
"""


def test_an_operation_keeps_its_id() -> None:
    """A renamed function of an endpoint renames no method of a generated client: see `operation_id`."""
    document = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()
    found = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert sorted(found) == OPERATION_IDS.split()


def test_the_document_is_written_once_and_never_on_the_event_loop(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a tenth of a second, in which nobody else would be answered, and who asks needs no key."""
    with Api(settings) as api:
        app: Any = api.server.config.app
        write, threads = app.openapi, []
        monkeypatch.setattr(app, "openapi", lambda: threads.append(threading.get_ident()) or write())
        with ThreadPoolExecutor(4) as pool:
            answers = {answer.content for answer in pool.map(lambda _: api.get("/openapi.json"), range(8))}
        assert len(answers) == len(threads) == 1 and threads != [api._thread.ident]
