"""Routes of the login."""

import asyncio
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from tapscope.dashboard.report.html import environment
from tapscope.dashboard.web.login import SESSION_S, Login
from tapscope.http.access import RequestRefused

MAX_PASSWORD = 1024


def add_login_routes(app: FastAPI, login: Login) -> None:
    """Add the routes for login by link or password, and for logout."""

    def form(message: str, status: int = 200) -> Response:
        page = environment().get_template("login.html.j2").render(message=message, password=login.needs_password)
        return HTMLResponse(page, status)

    def opened(session: str) -> Response:
        response = RedirectResponse("/", 303)
        response.set_cookie(login.cookie, session, max_age=int(SESSION_S), httponly=True, samesite="strict", path="/")
        return response

    @app.get("/login")
    def get_login(token: str = "") -> Response:
        if not token:
            return form(f"Log in: {login.hint}.")
        try:
            return opened(login.by_link(token))
        except RequestRefused as refused:
            return form(refused.error, refused.status)

    @app.post("/login")
    async def post_login(request: Request) -> Response:
        try:
            fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=8)
        except ValueError:
            return form("the form has more fields than a password; use the form of this page", 400)
        password = fields.get("password", [""])[0][:MAX_PASSWORD]
        try:
            return opened(await asyncio.to_thread(login.by_password, password))
        except RequestRefused as refused:
            return form(refused.error, refused.status)

    @app.post("/logout")
    def post_logout(request: Request) -> Response:
        login.logout(request.headers)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(login.cookie, path="/")
        return response
