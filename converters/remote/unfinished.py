"""Uploads in parts that were never completed: invisible in listings, and paid for until somebody aborts them.

obstore neither names nor lists them, so S3 is asked through botocore, which finds credentials and regions as AWS's own tools
do. Azure forgets such parts after a week. Google's keep until a lifecycle rule of the bucket removes them.

Source: S3 API reference, ListMultipartUploads and AbortMultipartUpload.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from converters.names import printable
from converters.remote.failures import code_of
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.remote.address import RemotePath

_RULE = "a lifecycle rule of the bucket removes them: AbortIncompleteMultipartUpload"


def abort_unfinished(destination: RemotePath) -> str:
    """Aborts every unfinished upload of a destination and of what is below it: nobody else may be writing there.

    Returns:
        A sentence for a person: what was aborted, or why some may be left; empty if there is nothing to say.
    """
    scheme = destination.parts[0]
    shown = printable(str(destination))
    if scheme == "gs:":
        return f"parts of uploads that were cut off may be left at {shown}: {_RULE}"
    if scheme != "s3:":
        return ""
    try:
        client = _client()
        uploads, bucket = list(list_unfinished(destination, client)), destination.root_and_key[0].name
        for key, upload_id in uploads:
            client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except ImportError:
        why = "botocore is not installed (pip install 'distckpt[remote]')"
    except Exception as error:  # noqa: BLE001 - botocore's own; they may hold secrets, and the upload itself can go on
        why = code_of(error) or type(error).__name__
    else:
        return f"{counted(len(uploads), 'unfinished upload')} of an earlier run aborted" if uploads else ""
    return f"parts of uploads that were cut off may be left at {shown}, they could not be listed: {why}; {_RULE}"


def list_unfinished(destination: RemotePath, client: Any = None) -> Iterator[tuple[str, str]]:
    """`(key, upload id)` of each unfinished upload of an address on S3, and of what is below it.

    Raises:
        ImportError: botocore is not installed.
        botocore.exceptions.ClientError: The store refuses to list them.
        botocore.exceptions.BotoCoreError: It cannot be asked.
    """
    root, key = destination.root_and_key
    pages = (client or _client()).get_paginator("list_multipart_uploads").paginate(Bucket=root.name, Prefix=key)
    for page in pages:
        for upload in page.get("Uploads", ()):
            if upload["Key"] == key or upload["Key"].startswith(f"{key}/"):
                yield upload["Key"], upload["UploadId"]


def _client() -> Any:
    """S3 as obstore reaches it: the same endpoint and region, and buckets in the path where it would have them there."""
    session, config = import_module("botocore.session").get_session(), import_module("botocore.config")
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    in_host = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() == "true"
    return session.create_client(
        "s3",
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        endpoint_url=next((os.environ[name] for name in names if os.environ.get(name)), None),
        config=config.Config(s3={"addressing_style": "virtual" if in_host else "path"}, connect_timeout=10),
    )
