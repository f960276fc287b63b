"""The HTML report in Chromium, opened from disk without a network."""

import json

import pytest
from chromium import LOOKS, check_looks, look_of, page_of
from comparator_toy import Toy, weights
from toy_pair import PROMPTS, SITE, scaled, toy_pair

from tapscope.cli import main


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = toy_pair(tmp_path_factory.mktemp("browser"))
    Toy(weights(), tp=2, hooks={SITE: scaled}).write(root / "sharded", PROMPTS, steps=(11, 14)).close()
    pair = [str(root / "base"), str(root / "target")]
    main(["diff", *pair, "--html", str(root / "diff.html")])
    main(["diff", *pair, "--site", "model.layers.2.mlp*", "--html", str(root / "mlp.html")])
    main(["diff", str(root / "base"), str(root / "sharded"), "--html", str(root / "sharded.html")])
    main(["show", str(root / "base"), SITE, "--html", str(root / "show.html")])
    return root


def test_report_heat_map_is_read_and_followed_by_keyboard(chromium, report):
    with page_of(chromium, (report / "diff.html").as_uri(), offline=True) as page:
        canvas = page.locator("canvas")
        canvas.focus()
        reading = page.locator(".heat-reading")  # the cursor starts at the cause
        assert reading.inner_text().startswith("layer 2 · step 0 · error ÷ floor ")
        page.keyboard.press("Enter")
        assert page.locator("#filter").input_value() == ".2."
        visible = page.locator("#findings tbody tr:visible td:nth-child(2)").all_inner_texts()
        assert visible
        assert all(".2." in site for site in visible)
        page.locator("#filter").fill("")
        page.get_by_role("button", name="÷ floor").click()
        page.get_by_role("button", name="Sites").click()
        assert page.locator("[data-level=sites]").get_attribute("aria-pressed") == "true"


def test_report_heat_map_is_zoomed_in_time(chromium, report):
    with page_of(chromium, (report / "diff.html").as_uri(), offline=True) as page:
        reading, shown = page.locator(".heat-reading"), page.locator("#heat [role=status]")
        steps = json.loads(page.locator("#data").text_content())["layers"]["columns"]
        assert shown.inner_text() == ""
        page.locator("canvas").focus()
        page.keyboard.press("End")
        before = reading.inner_text()
        page.keyboard.press("+")
        assert shown.inner_text() == f"steps {steps[len(steps) // 2][0]} to {steps[-1][0]}"
        assert reading.inner_text() == before
        page.get_by_role("button", name="Sites").click()
        assert shown.inner_text() == f"steps {steps[len(steps) // 2][0]} to {steps[-1][0]}"
        page.get_by_role("button", name="Zoom out").click()
        assert shown.inner_text() == ""


def test_report_heat_map_of_modules_filters_the_findings_of_one(chromium, report):
    with page_of(chromium, (report / "diff.html").as_uri(), offline=True) as page:
        page.get_by_role("button", name="Modules").click()
        page.locator("canvas").focus()
        reading = page.locator(".heat-reading")
        rows = json.loads(page.locator("#data").text_content())["modules"]["rows"]
        at = next(i for i, row in enumerate(rows) if row["is_cause"])
        assert rows[at]["label"] == "model.layers.2.mlp"
        assert reading.inner_text().startswith("model.layers.2.mlp · step 0 · error ÷ floor ")
        page.keyboard.press("Enter")
        visible = page.locator("#findings tbody tr:visible td:nth-child(2)").all_inner_texts()
        assert visible
        assert all("model.layers.2.mlp" in site for site in visible)


def test_report_heat_map_is_by_rank_and_token_too(chromium, report):
    with page_of(chromium, (report / "sharded.html").as_uri(), offline=True) as page:
        page.get_by_role("button", name="Ranks").click()
        assert page.locator("#axis").inner_text() == "rank"
        page.locator("canvas").focus()
        page.keyboard.press("ArrowDown")
        assert " · rank 0 · " in page.locator(".heat-reading").inner_text()
        page.get_by_role("button", name="Tokens").click()
        assert " · token 0:0 · " in page.locator(".heat-reading").inner_text()
    with page_of(chromium, (report / "diff.html").as_uri(), offline=True) as page:
        assert page.locator("[data-level]").all_inner_texts() == ["Layers", "Modules", "Sites", "Tokens"]


@pytest.mark.parametrize("name", ["mlp.html", "show.html"])
@pytest.mark.parametrize("looks", LOOKS)
def test_report_is_accessible(chromium, report, name, looks):
    with page_of(chromium, (report / name).as_uri(), offline=True, **look_of(*looks[0])) as page:
        check_looks(page, looks)


def test_report_policy_blocks_an_injected_script(chromium, report):
    text = (report / "diff.html").read_text().replace("<main>", "<main><script>window.injected = 1</script>")
    (report / "injected.html").write_text(text)
    with (
        pytest.raises(AssertionError, match="Content Security Policy"),
        page_of(chromium, (report / "injected.html").as_uri(), offline=True) as page,
    ):
        assert page.evaluate("window.injected") is None
        assert page.locator("canvas").count() == 1
