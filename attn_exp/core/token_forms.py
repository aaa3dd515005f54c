"""The forms of tokens that services give out, by which one is recognised in text that merely quotes it.

The list has the services of detect-secrets 1.5 (https://github.com/Yelp/detect-secrets, folder `plugins`), and those
whose tokens a benchmark is likely to meet and that it lacks: GitHub's `github_pat_`, Hugging Face, Anthropic, Google,
Databricks, DigitalOcean and NVIDIA. docs/security.md says why that library itself is not called.
"""

import re
from functools import cache

# Each as its first letters and the rest, since few texts have the letters, and no other is searched further.
_FORMS = (
    *((begin, r"[A-Z0-9]{16,17}\b") for begin in ("AKIA", "ASIA", "ABIA", "ACCA", "A3T")),  # AWS
    ("gh", r"[oprsu]_\w{30,}"),  # GitHub
    ("github_pat_", r"\w{20,}"),
    ("gl", r"(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[\w.-]{20,}"),  # GitLab
    ("GR1348941", r"[\w-]{20,}"),
    ("hf_", r"[A-Za-z0-9]{30,}"),  # Hugging Face
    ("sk-", r"[\w-]{20,}"),  # OpenAI, Anthropic
    *((begin, r"[A-Za-z0-9]{16,}") for begin in ("sk_live_", "rk_live_", "sk_test_", "rk_test_")),  # Stripe
    ("whsec_", r"[A-Za-z0-9+/=]{16,}"),
    ("sq0", r"[a-z]{3}-[\w\\-]{22,}"),  # Square
    ("xox", r"[a-z]-[\w-]{10,}"),  # Slack
    ("hooks.slack.com/services/", r"[\w/]+"),
    ("AIza", r"[\w-]{35}"),  # Google
    ("ya29.", r"[\w-]{20,}"),
    ("GOCSPX-", r"[\w-]{20,}"),
    ("npm_", r"[A-Za-z0-9]{36}"),
    ("pypi-", r"[\w-]{50,}"),
    ("dapi", r"[0-9a-f]{32}"),  # Databricks
    ("do", r"[opr]_v1_[0-9a-f]{64}"),  # DigitalOcean
    ("nvapi-", r"[\w-]{20,}"),  # NVIDIA
    ("AKC", r"[A-Za-z0-9]{10,}"),  # Artifactory
    ("SG.", r"[\w-]{16,}\.[\w-]{16,}"),  # SendGrid
    ("AC", r"[0-9a-z]{32}\b"),  # Twilio
    ("SK", r"[0-9a-z]{32}\b"),
    ("eyJ", r"[\w=-]{8,2000}\.[\w=-]{4,}(?:\.[\w.+/=-]*)?"),  # a JSON web token (RFC 7519)
)
# Letters that the others have, and their forms.
_OTHERS = (
    ("-us", r"\b[0-9a-z]{32}-us[0-9]{1,2}\b"),  # Mailchimp
    (":", r"\b[0-9]{8,10}:[\w-]{35}(?![\w-])"),  # Telegram
    (".", r"\b[MNO](?=[A-Za-z_-]{0,24}[0-9])[\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}"),  # Discord
    ("PRIVATE KEY", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?s:.*?)(?:-----END[A-Z0-9 ]*-----|\Z)"),
    ("PuTTY-User-Key-File-", r"PuTTY-User-Key-File-(?s:.*)"),
)
# Whatever is given for such a name, as a header, too, or for such an option. A number is a count: `token=4096`.
_NAMED = (
    r"(?i)(?P<name>(?:password|passwd|passphrase|secret|_pwd|(?:api|access|account)[_-]?key"
    r"|(?:access|auth|bearer|private|refresh|security|session)[_-]?token|aws\w{0,20}(?:key|token|pwd))"
    r"['\"]?(?:=['\"]?|\s{0,9}[=:]\s{0,9}['\"]?(?=[^\s'\",;&]{6}))"
    r"|['\"](?:token|pwd|pass|auth|jwt)['\"]\s{0,9}:\s{0,9}['\"](?=[^\s'\",;&]{6})"
    r"|\blogin\s{1,9}\S{1,300}\s{1,9}password\s{1,9}"
    r"|(?<![\w-])--(?:password|passwd|token|secret|api-key)\s{1,9}['\"]?)(?!\*\*\*)(?![\d.]+\b)[^\s'\",;&]+"
)
_NAMES = re.compile(r"pass(?:w|phrase)|secret|key|token|aws|_pwd|['\"](?:pwd|pass|auth|jwt)['\"]", re.IGNORECASE)


def without_tokens(text: str) -> str:
    """Return the text with `***` in place of each token, private key, and value that is given for a password."""
    for begin, rest in _FORMS:
        if begin in text:
            text = _compiled(f"{re.escape(begin)}(?<![A-Za-z0-9_]{re.escape(begin)}){rest}").sub("***", text)
    for letters, form in _OTHERS:
        if letters in text:
            text = _compiled(form).sub("***", text)
    return _compiled(_NAMED).sub(r"\g<name>***", text) if _NAMES.search(text) else text


# Not when this is imported: most processes need none of them.
@cache
def _compiled(form: str) -> re.Pattern[str]:
    return re.compile(form)
