"""Error messages for a store's failures, and which of them are temporary.

Their own texts are not shown: they may hold secrets.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from converters.remote.address import Root

_STATUS = re.compile(r"status(?: code)?:? (\d{3})|\b(\d{3}) (?:Client|Server) Error")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]{1,60})\s*</Code>|\"?[cC]ode\"?: \"?([A-Za-z]\w{1,60})")
_PASSING: Final = (408, 429, 500, 502, 503, 504)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidSecurity")
_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
)
_NO_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "MissingAccount")
"""Marks of a store that has asked the machine itself, for want of anything else, or does not know the account."""
_WAYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true of a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login; GOOGLE_SKIP_SIGNATURE=true of a "
    "public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
    "AZURE_SKIP_SIGNATURE=true of a public container",
}
_NETWORK = {
    "connection refused": "connection refused",
    "dns error": "its name cannot be resolved",
    "name or service not known": "its name cannot be resolved",
    "timed out": "no answer in time",
    "timedout": "no answer in time",
    "timeout": "no answer in time",
    "connection reset": "connection reset",
    "unreachable": "network unreachable",
    "certificate": "its certificate is not trusted",
    "end of file": "the answer was cut short",
    "incompletemessage": "the answer was cut short",
    "incomplete": "the answer was cut short",
    "error decoding response body": "the answer was cut short",
    "connection closed": "the connection was closed",
    "broken pipe": "the connection was closed",
}


class StatedError(OSError):
    """A permanent failure whose message is ready to be shown."""


class CutError(Exception):
    """An answer that has another length than it should have."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    Attributes:
        sentence: In words, about the store or the object.
        temporary: It may be over soon.
        number: Of the `OSError` that says it.
        expired: The credentials were good, and are not any more.
    """

    sentence: str
    temporary: bool = False
    number: int = errno.EIO
    expired: bool = False

    def error(self, address: str, waited: float = 0.0) -> OSError:
        """The error to raise; tried for so many seconds."""
        tried = f" (tried again for {waited:.0f} s)" if self.temporary and waited >= 1 else ""
        return OSError(self.number, self.sentence + tried, address)


def code_of(error: Exception) -> str:
    """The store's code in an error of botocore's, such as `AccessDenied`; empty if there is none."""
    code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code", "")
    return code if re.fullmatch(r"[A-Za-z0-9_.]{1,60}", str(code)) else ""


def failure_of(error: BaseException, root: Root) -> Failure | None:
    """The meaning of an exception of a request; None if it is clear as it is, such as a missing object."""
    text = str(error)
    status = next((int(first or second) for first, second in _STATUS.findall(text)), 0)
    code = next((first or second for first, second in _CODE.findall(text)), "")
    answer = f"{status} {code}".strip() if status else code
    bucket = f"{root.scheme}://{root.name.partition('/')[0]}"
    if code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName"):
        return Failure(f"there is no bucket {root.name}", number=errno.ENXIO)
    if isinstance(error, FileNotFoundError):
        return None
    if isinstance(error, CutError):
        return Failure(f"{bucket} cuts its answers short: {text}", temporary=True)
    if any(mark in text for mark in _NO_CREDENTIALS):
        where = "were found in the environment or in the cloud's configuration files"
        return Failure(f"no credentials for {bucket} {where}: {_WAYS.get(root.scheme, 'log in')}", number=errno.EACCES)
    if code in _EXPIRED:
        return Failure(
            f"the credentials for {bucket} have expired ({code}): renew them and run the same command again",
            number=errno.EACCES,
            expired=True,
        )
    if code in _REGION or "incorrectly configured region" in text or status in (301, 307, 308):
        return Failure(
            f"the bucket is in another region than the one that was asked ({answer or 301}): set AWS_REGION to the bucket's",
            number=errno.ENXIO,
        )
    if code == "RequestTimeTooSkewed":
        return Failure(f"this machine's clock differs too much from that of {bucket} ({code})", number=errno.EACCES)
    if code in _REFUSED or status == 401 or type(error).__name__ == "UnauthenticatedError":
        return Failure(f"{bucket} does not accept the credentials ({answer or 401})", number=errno.EACCES)
    if status == 403 or type(error).__name__ == "PermissionDeniedError" or code == "AccessDenied":
        return Failure(f"no permission in {bucket} ({answer or 403})", number=errno.EACCES)
    if "NotPartial" in text or "non-partial response" in text or type(error).__name__ == "NotSupportedError":
        return Failure(f"{bucket} does not serve byte ranges, which reading needs: copy the checkpoint to a disk")
    if status in _PASSING or code in ("SlowDown", "ServerBusy", "InternalError", "RequestTimeout"):
        return Failure(f"{bucket} answers {answer}", temporary=True)
    if status:
        return Failure(f"{bucket} answers {answer}")
    return _of_network(error, text.lower(), bucket)


def _of_network(error: BaseException, text: str, bucket: str) -> Failure | None:
    why = next((words for mark, words in _NETWORK.items() if mark in text), None)
    if why == "its certificate is not trusted":
        return Failure(f"{bucket} cannot be trusted: {why}")
    if why is not None or "http error" in text or isinstance(error, ConnectionError | TimeoutError):
        return Failure(f"{bucket} cannot be reached: {why or 'the connection failed'}", temporary=True)
    if type(error).__module__.startswith("httpx"):
        return Failure(f"{bucket} cannot be reached: the connection failed", temporary=True)
    if type(error).__module__.startswith("obstore"):
        first = re.sub(r"\w+://\S+", "URL", str(error).partition("\n")[0])[:200]
        return Failure(f"{bucket}: {first}")
    if isinstance(error, OSError):
        return Failure(f"{bucket}: {error.strerror or os.strerror(error.errno or errno.EIO)}", temporary=True)
    return None
