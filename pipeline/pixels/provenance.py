"""Marks finished images for machines as generated: XMP, content credentials (C2PA 2.1) and an invisible watermark.

Each file says IPTC's digital source type twice: in its XMP, which any reader of metadata shows, and in a C2PA manifest,
which is signed and covers the file's bytes. Regulation (EU) 2024/1689, article 50(2), asks for such marks.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import secrets
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import Settings
from core.extras import pip_install
from pipeline.checkpoints.folder import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

_SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
GENERATED, EDITED = _SOURCE_TYPES + "trainedAlgorithmicMedia", _SOURCE_TYPES + "compositeWithTrainedAlgorithmicMedia"
"""IPTC's digital source type of an image drawn from a prompt, and of one in which a given image was changed."""

_XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType="{}"/>'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
_SIGNING = "1.3.6.1.4.1.62558.2.1"  # C2PA's extended key usage of a certificate that signs claims
_VALID = timedelta(days=3650)


class Provenance:
    """Marks images. Thread-safe."""

    def __init__(self, certificates: str, private_key: str, *, watermark: bool = False) -> None:
        """`certificates` is the signer's, and those up to its root, in PEM; `private_key` is in PEM without a password:
        of P-256. Raises `ModelError`.
        """
        self._certificates, self._private_key, self._watermark = certificates, private_key, watermark
        try:
            state, codes = _verified(self.signed(_pixel(), "image/png", GENERATED))
        except Exception as error:  # c2pa's own errors, of which there are many
            raise ModelError(f"provenance_certificate, provenance_key: cannot sign ({error})") from error
        if state == "Invalid":
            raise ModelError(
                f"provenance_certificate, provenance_key: what they sign is not valid ({', '.join(codes)})"
            )

    def watermarked(self, image: Image) -> Image:
        """Return the image with the watermark, if there is to be one and it is large enough."""
        if not self._watermark or image.mode != "RGB":
            return image
        import numpy as np
        from PIL.Image import fromarray

        from pipeline.pixels import watermark

        return fromarray(watermark.embed(np.asarray(image)))

    def signed(self, data: bytes, media_type: str, source_type: str) -> bytes:
        """Return the image file with a signed manifest."""
        import c2pa

        agent = {"name": "Diptych", "version": _version()}
        action = {"action": "c2pa.created", "digitalSourceType": source_type, "softwareAgent": agent}
        manifest = {
            "claim_generator_info": [agent],
            "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [action]}}],
        }
        signer = c2pa.Signer.from_info(
            c2pa.C2paSignerInfo(
                alg=c2pa.C2paSigningAlg.ES256, sign_cert=self._certificates.encode(),
                private_key=self._private_key.encode(), ta_url=None,
            )
        )  # fmt: skip
        file = io.BytesIO()
        with signer, c2pa.Builder(manifest, context=self._context) as builder:
            builder.sign(signer, media_type, io.BytesIO(data), file)
        return file.getvalue()

    @cached_property
    def _context(self) -> Any:
        """Without a thumbnail, which would be as large as the file, and without reading the file once more."""
        import c2pa

        settings = {"verify": {"verify_after_sign": False}, "builder": {"thumbnail": {"enabled": False}}}
        return c2pa.Context(c2pa.Settings.from_dict(settings))


def xmp(source_type: str) -> str:
    """Return the XMP packet of an image with this digital source type."""
    return _XMP.format(source_type)


def of(settings: Settings) -> Provenance | None:
    """Return what marks images by the settings. Raises `ModelError`."""
    if settings.provenance == "off":
        return None
    if importlib.util.find_spec("c2pa") is None or importlib.util.find_spec("cryptography") is None:
        raise ModelError(f"provenance: c2pa-python is not installed ({pip_install('provenance')})")
    certificate, key = settings.provenance_certificate, settings.provenance_key
    if (certificate is None) != (key is None):
        raise ModelError("provenance_certificate, provenance_key: give both or neither")
    try:
        if certificate is None or key is None:
            certificates, private_key = _own(settings.data_dir.expanduser() / "provenance.pem")
        else:
            certificates, private_key = (path.expanduser().read_text("utf-8") for path in (certificate, key))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"provenance_certificate, provenance_key: cannot be read ({error})") from error
    return Provenance(certificates, private_key, watermark=settings.provenance.endswith("+watermark"))


def _own(path: Path) -> tuple[str, str]:
    """The certificates and the key in the file, which one of many processes makes, and writes whole."""
    if not path.exists():
        certificates, private_key = self_signed()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{secrets.token_hex(8)}.part")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(private_key + certificates)
        try:
            os.link(partial, path)
        except FileExistsError:
            pass  # another process's
        except OSError:  # a file system without links
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    private_key, begin, certificates = path.read_text("utf-8").partition("-----BEGIN CERTIFICATE-----")
    return begin + certificates, private_key


def self_signed() -> tuple[str, str]:
    """Return a certificate and its root's, and its key, in PEM. Readers find its signatures valid, but not trusted."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name(
            [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Diptych"), x509.NameAttribute(NameOID.COMMON_NAME, name)]
        )
        for name in ("Diptych root", "Diptych")
    ]
    certificates = []
    for key, name, root in zip(keys, names, (True, False), strict=True):
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only"), False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), critical=False)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=root, crl_sign=root, **usage), critical=True
            )
        )
        if not root:
            purposes = [x509.ObjectIdentifier(_SIGNING), ExtendedKeyUsageOID.EMAIL_PROTECTION]
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        certificates.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode())
    private_key = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return "".join(reversed(certificates)), private_key.decode()


def _version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:  # a source checkout without installation
        return "unknown"


def _verified(png: bytes) -> tuple[str, list[str]]:
    """C2PA's validation state of a file, and the codes of what is wrong with it."""
    import c2pa

    with c2pa.Reader("image/png", io.BytesIO(png)) as reader:
        report = json.loads(reader.json())
    return report["validation_state"], [status["code"] for status in report.get("validation_status", ())]


def _pixel() -> bytes:
    """A PNG to try the key on."""
    from PIL.Image import new

    file = io.BytesIO()
    new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()
