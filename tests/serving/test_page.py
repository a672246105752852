"""The page in headless Chromium: translate, stream, cancel, race, narrow and dark."""

import contextlib
import re
import shutil

import pytest

from servers import Paced, client, models, serving, until
from texts import engine, sentences
from writehead.config import DecodeConfig
from writehead.serving.models import Served
from writehead.serving.settings import Settings

webdriver = pytest.importorskip("selenium.webdriver")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its driver")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    """Opens the page of a server; at the end, its console must have no message."""

    @contextlib.contextmanager
    def open_page(url, **media):
        features = [{"name": name, "value": value} for name, value in media.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(str(url))
        until(lambda: browser.execute_script("return document.body.dataset.ready"))
        yield browser
        assert browser.get_log("browser") == []
        browser.get("about:blank")  # or it would miss the server when that stops

    return open_page


def by_id(browser, name):
    return browser.find_element("id", name)


def rows(browser, selector):
    return [one.text for one in browser.find_elements("css selector", selector)]


def test_it_translates_as_you_type(page, http, served):
    with page(http.base_url) as browser:
        by_id(browser, "source").send_keys("the cat sees\n\na dog")
        lines = ["the cat sees", "", "a dog"]
        options = DecodeConfig(beam=4, n_best=4)
        outputs = [*served[0].engine.translate(lines, options)]
        expected = "\n".join(output.text for output in outputs)
        target = by_id(browser, "target")
        until(lambda: target.get_property("textContent") == expected)
        texts = [one.text for one in outputs[0].hypotheses]
        found = browser.find_elements("css selector", "#hypotheses li")
        assert len(found) == len(texts)
        for one, hypothesis in zip(found, outputs[0].hypotheses, strict=True):
            assert f"{hypothesis.score:.3f}" in one.text
        leaves = rows(browser, "#tree .leaf")
        assert sorted(leaves) == sorted(f"{one.score:.3f}" for one in outputs[0].hypotheses)
        words = re.findall(r"\d+ tokens in \d+ ms", by_id(browser, "translate-status").text)
        assert words


def test_nothing_is_loaded_from_elsewhere(page, http):
    with page(http.base_url):
        for path in ("/", "/app.js", "/style.css", "/icon.svg"):
            response = http.get(path)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert not re.search(r"https?://(?!www\.w3\.org)|unsafe|<script>|style=", response.text)


def test_it_streams_and_cancels(page):
    served = models()
    lines = sentences(40, seed=6)
    texts = [one.text for one in served[1].engine.generate(lines)]
    prompt, text = max(zip(lines, texts, strict=True), key=lambda pair: len(set(pair[1])))
    paced = Paced(served[1].engine)
    with client(served) as http, page(http.base_url) as browser:
        by_id(browser, "prompt").send_keys(prompt)
        temperature = by_id(browser, "temperature")
        temperature.clear()
        temperature.send_keys("0")
        by_id(browser, "generate").click()
        paced.allow(9)
        output = by_id(browser, "continuation")
        until(lambda: len(output.get_property("textContent")) > len(prompt))
        assert (prompt + text).startswith(output.get_property("textContent"))
        by_id(browser, "cancel").click()
        until(lambda: "cancelled" in by_id(browser, "write-status").text)
        paced.allow()
        until(lambda: 'finished_reason="abort"' in http.get("/metrics").text)
        by_id(browser, "prompt").send_keys(webdriver.Keys.CONTROL, webdriver.Keys.ENTER)
        until(lambda: output.get_property("textContent") == prompt + text)
        until(lambda: by_id(browser, "generate").is_enabled())


def test_two_models_race(page):
    other = Served("multi-head", engine("translation", g=6), ("en", "de"))
    settings = Settings(compare="multi-head")
    with serving([*models(), other], settings) as url, page(url) as browser:
        by_id(browser, "start").click()
        until(lambda: "times as many tokens per second" in by_id(browser, "race-status").text)
        first, second = rows(browser, "#lanes tr")
        assert "toy-en-de" in first
        assert "multi-query" in first
        assert "multi-head" in second


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_screens_and_follows_the_scheme(page, http, width, scheme):
    with page(http.base_url, **{"prefers-color-scheme": scheme}) as browser:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        by_id(browser, "source").send_keys("the cat sees a dog over the tree and then a bird sings")
        until(lambda: rows(browser, "#tree .leaf"))
        wide = "return document.documentElement.scrollWidth - window.innerWidth"
        assert browser.execute_script(wide) <= 0
        color = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", color)[:3])) < 200 or scheme == "light"
        assert len(rows(browser, "figure")) == 3


def test_a_key_is_asked_for(page, served):
    with serving(served, Settings(keys=("secret",))) as url, page(url) as browser:
        key = by_id(browser, "key")
        assert key.is_displayed()
        key.send_keys("secret", webdriver.Keys.TAB)
        by_id(browser, "source").send_keys("the cat")
        until(lambda: by_id(browser, "target").text)
