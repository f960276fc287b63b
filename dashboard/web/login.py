"""Login by a one-time link on loopback or by password elsewhere, with sessions in a cookie."""

import hashlib
import hmac
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from threading import Lock, RLock

from tapscope.core.errors import ConfigError
from tapscope.http.access import RequestRefused

PASSWORD = "TAPSCOPE_WEB_PASSWORD"
COOKIE = "tapscope_session"
"""Prefix of the cookie's name."""
SESSION_S = 12 * 3600.0
"""Seconds from the last request of a session until it expires."""
MAX_SESSIONS = 256
MAX_LINKS = 64
"""Maximum number of valid read-only links; a new one replaces the link that expires first."""
ATTEMPTS, ATTEMPTS_S = 5, 60.0
"""Rate limit: number of wrong passwords, and seconds in which they count. Further attempts are refused unchecked."""
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}


@dataclass(slots=True)
class _Session:
    end: float
    last: float = math.inf
    """Expiry beyond which requests do not extend the session."""
    read_only: bool = False


class Login:
    """Access control of the web page."""

    def __init__(self, password: str = "", clock: Callable[[], float] = time.monotonic, port: int = 0) -> None:
        """Without a ``password``, the one-time link is the only way to log in.

        Browsers send cookies to every port of a host, so the name of each server's cookie contains the ``port``.
        """
        self._clock = clock
        self.cookie = f"{COOKIE}_{port}" if port else COOKIE
        """Name of the session cookie."""
        self._salt = secrets.token_bytes(16)
        self._password = self._derived(password) if password else b""
        self._link = secrets.token_urlsafe(32)
        self._is_used = False
        self._sessions: dict[str, _Session] = {}
        self._read_only_links: dict[str, float] = {}
        """Digest of a link's token -> expiry."""
        self._lock = RLock()
        """Guards links and sessions, because requests run in several threads; never held during scrypt."""
        self._attempt = Lock()
        """Serializes password attempts, so that parallel requests cannot exceed the limit."""
        self._failures: deque[float] = deque(maxlen=ATTEMPTS)

    @property
    def needs_password(self) -> bool:
        """Whether login by password is enabled."""
        return bool(self._password)

    @property
    def hint(self) -> str:
        """Instructions for logging in."""
        if self.needs_password:
            return "enter the password"
        if self._is_used:
            return "each link opens one session; restart tapscope web and open the new link"
        return "open the link that tapscope web printed"

    @property
    def link(self) -> str:
        """Current one-time token; replaced after each use."""
        return self._link

    def by_link(self, token: str) -> str:
        """Open a session by token; return its id. Raises RequestRefused (403) for a wrong, used or expired token."""
        with self._lock:
            end = self._read_only_links.get(_digest(token), -math.inf)
            if end > self._clock():
                return self._open(last=end, read_only=True)
            if end > -math.inf:
                raise RequestRefused(403, "this read-only link has expired; ask for another one")
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self._link.encode()):
                raise RequestRefused(403, "this link is wrong or has been used; restart tapscope web for another one")
            self._link, self._is_used = secrets.token_urlsafe(32), True
            return self._open()

    def by_password(self, password: str) -> str:
        """Open a session by password; return its id. Raises RequestRefused: 403, or 429 after too many wrong ones."""
        with self._attempt:
            now = self._clock()
            if len(self._failures) == ATTEMPTS and now - self._failures[0] < ATTEMPTS_S:
                raise RequestRefused(429, "too many wrong passwords; try again in a minute", {"Retry-After": "60"})
            if not self._password or not hmac.compare_digest(self._derived(password), self._password):
                self._failures.append(now)
                raise RequestRefused(403, "wrong password")
        return self._open()

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RequestRefused (401) unless the cookie belongs to an unexpired session; extend the session."""
        session, now = session_of(headers, self.cookie), self._clock()
        digest = _digest(session)
        with self._lock:
            session_state = self._sessions.get(digest)
            if not session or session_state is None or session_state.end < now:
                self._sessions.pop(digest, None)
                raise RequestRefused(401, f"not logged in: {self.hint}")
            session_state.end = min(now + SESSION_S, session_state.last)

    def check_full(self, headers: Mapping[str, str]) -> None:
        """Like :meth:`check`, but also raise RequestRefused (403) for a read-only session."""
        self.check(headers)
        with self._lock:
            session = self._sessions.get(_digest(session_of(headers, self.cookie)))
            if session is None or session.read_only:
                raise RequestRefused(403, "this session is read-only")

    def add_read_only_link(self, seconds: float) -> str:
        """Create a read-only link; return its token.

        Until it expires, anyone with the token can read; its sessions expire at the same time.
        """
        token, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            while len(self._read_only_links) >= MAX_LINKS:
                self._read_only_links.pop(min(self._read_only_links, key=self._read_only_links.__getitem__))
            self._read_only_links[_digest(token)] = now + seconds
        return token

    def logout(self, headers: Mapping[str, str]) -> None:
        """End the session of the cookie."""
        with self._lock:
            self._sessions.pop(_digest(session_of(headers, self.cookie)), None)

    def _open(self, last: float = math.inf, *, read_only: bool = False) -> str:
        now, session = self._clock(), secrets.token_urlsafe(32)
        with self._lock:
            self._sessions = {name: each for name, each in self._sessions.items() if each.end > now}
            while len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(min(self._sessions, key=lambda name: self._sessions[name].end))
            self._sessions[_digest(session)] = _Session(min(now + SESSION_S, last), last, read_only)
        return session

    def _derived(self, password: str) -> bytes:
        return hashlib.scrypt(password.encode("utf-8", "replace"), salt=self._salt, **_SCRYPT)


def session_of(headers: Mapping[str, str], name: str) -> str:
    """Return the session id in the cookie ``name`` of a request; empty if there is none."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def read_password(file: Path | None) -> str:
    """Return the first line of ``file``, else the value of TAPSCOPE_WEB_PASSWORD, else an empty string.

    Raises ConfigError if the file cannot be read or has no password.
    """
    if file is None:
        return os.environ.get(PASSWORD, "")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read --password-file {file}: {getattr(error, 'strerror', None) or error}") from None
    if not lines or not lines[0]:
        raise ConfigError(f"--password-file {file}: expected a password on the first line")
    return lines[0]


def _digest(session: str) -> str:
    return hashlib.sha256(session.encode("utf-8", "replace")).hexdigest()
