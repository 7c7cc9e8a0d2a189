"""The playground in a real browser, on a desk and a phone: `make playground-check`.

The server is a process of its own, with trees, and the browser is Chromium: Debian's, or Playwright's own.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from playwright.sync_api import expect, sync_playwright

# Trees always: measured costs may say that plain decoding is faster here.
SERVE = ("serve", "--budget", "32", "--algorithm", "top_nodes", "--max-num-seqs", "2")
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
PROMPT = "def read_lines(path):\n"
#: Milliseconds of what may compile first.
COMPILING = 300_000


@pytest.fixture(scope="session")
def url():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "jetspec_jax", *SERVE, "--port", str(port)])
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while True:
            assert process.poll() is None, "the server has ended"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/version").close()
                break
            assert time.monotonic() < end
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as driver:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=SIZES)
def page(request, chromium, url):
    """The page, which has loaded nothing from elsewhere and said nothing to the console in the end."""
    width, height = SIZES[request.param]
    context = chromium.new_context(
        viewport={"width": width, "height": height}, has_touch=request.param == "phone"
    )
    own = context.new_page()
    asked, said = [], []
    own.on("request", lambda request: asked.append(request.url))
    own.on("console", lambda message: said.append(message.text))
    own.on("pageerror", lambda error: said.append(str(error)))
    own.goto(f"{url}/playground")
    yield own
    assert own.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
    assert {re.match(r"data:|https?://[^/]+", address)[0] for address in asked} <= {url, "data:"}
    # Chromium itself says so of a request that is refused.
    assert [text for text in said if "status of 400 (Bad Request)" not in text] == []


def setting(page, name, value):
    if not page.locator("#settings").get_attribute("open") is not None:
        page.click("#settings summary")
    page.fill(f"#{name}", str(value))


def run(page, ends="Run"):
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Stop")
    expect(page.locator("#run")).to_have_text(ends, timeout=COMPILING)


def shown(page):
    return "".join(page.locator("#talk .turn").last.locator(".run").all_text_contents())


def answer(url, **asked):
    body = {"prompt": PROMPT, "temperature": 0, "budget": 1, **asked}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["text"]


def test_text_comes_in_pieces_and_is_plain_decoding_s(page, url):
    setting(page, "max-tokens", 200)
    page.evaluate("""() => {
        const talk = document.querySelector("#talk");
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(talk.textContent.length))
            .observe(talk, {childList: true, subtree: true});
    }""")
    run(page)
    pieces = page.evaluate("[...new Set(window.lengths)]")
    assert len(pieces) > 4
    assert pieces == sorted(pieces)
    assert shown(page) == answer(url, max_tokens=200)
    assert page.locator("#talk .given").text_content() == PROMPT
    assert float(page.locator("#tau").text_content()) > 1.5
    page.click("#measure")
    expect(page.locator("#verdict")).to_have_text("Plain decoding wrote the same text.", timeout=COMPILING)
    assert int(page.locator("#plain").text_content()) > 0
    assert int(page.locator("#speed").text_content()) > 0


def test_the_accepted_paths_are_the_text(page, url):
    setting(page, "max-tokens", 40)
    page.click("label[for=traced]")
    run(page)
    rounds = page.locator("#talk .run").count()
    expect(page.locator("#round")).to_contain_text(f"Round {rounds} of {rounds}")
    text = answer(url, max_tokens=40)
    assert shown(page) == text
    joined = ""
    for number in range(1, rounds + 1):
        page.locator("#slider").fill(str(number))
        expect(page.locator("#round")).to_contain_text(f"Round {number} of {rounds}")
        # The anchor is the bonus of the round before; labels make white space visible.
        path = page.locator("#tree .node.accepted .name, #tree .node.bonus .name").all_text_contents()
        joined += "".join(path[1:])
        assert (
            len(path) - 1 == int(re.search(r"(\d+) accepted", page.locator("#round").text_content())[1]) + 1
        )
    counted = re.sub(r"([·↵⇥])×(\d+)", lambda own: own[1] * int(own[2]), joined)
    visible = counted.replace("·", " ").replace("↵", "\n").replace("⇥", "\t")
    assert visible.startswith(text)
    # A round that is picked in the text is shown.
    page.locator("#talk .run").nth(1).click()
    expect(page.locator("#round")).to_contain_text("Round 2 of")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#round")).to_contain_text("Round 3 of")


def test_the_prompt_covers_nothing_of_the_tree(page):
    setting(page, "max-tokens", 24)
    page.click("label[for=traced]")
    run(page)
    tree, prompt = (page.locator(name).bounding_box() for name in ("#tree", "#composer"))
    assert tree["y"] + tree["height"] <= prompt["y"], "all of it is seen without a scroll"
    for place in ("start", "center", "end"):
        page.evaluate("at => document.querySelector('#tree').scrollIntoView({block: at})", place)
        prompt = page.locator("#composer").bounding_box()
        assert prompt["y"] + prompt["height"] <= page.viewport_size["height"]
        # What is seen at the places of the tree that are on the screen and not below the part that scrolls.
        covered = page.evaluate("""() => {
            const {left, right, top, bottom} = document.querySelector("#tree").getBoundingClientRect();
            const shown = document.querySelector("#shown").getBoundingClientRect();
            const low = Math.min(bottom, shown.bottom || bottom), high = Math.max(top, shown.top);
            return [.02, .25, .5, .75, .98].flatMap(share => [left + 4, (left + right) / 2, right - 4].filter(
                x => !document.elementFromPoint(x, high + share * (low - high))?.closest("#tree")));
        }""")
        assert covered == []


@pytest.mark.parametrize("trees", [False, True])
def test_stop_stops(page, url, trees):
    setting(page, "max-tokens", 900)
    setting(page, "temperature", 1)
    setting(page, "seed", 5)
    if trees:
        page.click("label[for=traced]")
    page.click("#run")
    page.locator("#talk .run").nth(3).wait_for(timeout=COMPILING)
    assert running(url, "traces" if trees else "requests")
    page.click("#run")
    expect(page.locator("#run")).to_have_text("Run")
    expect(page.locator("#state")).to_have_text("stopped")
    before = shown(page)
    page.wait_for_timeout(500)
    assert shown(page) == before
    assert 0 < page.locator("#talk .run").count() < 900
    # The server has let go of it.
    end = time.monotonic() + 30
    while running(url, "traces" if trees else "requests"):
        assert time.monotonic() < end
        time.sleep(0.1)


def running(url, what):
    with urllib.request.urlopen(f"{url}/metrics") as response:
        said = response.read().decode()
    [line] = re.findall(rf"^jetspec:num_{what}_running\S* (\S+)$", said, re.MULTILINE)
    return float(line)


def test_a_chat_goes_on(page):
    setting(page, "max-tokens", 12)
    page.click("#as-chat")
    for count in (1, 2):
        page.fill("#prompt", f"Message {count}")
        run(page, "Send")
        assert page.locator("#talk .user").count() == page.locator("#talk .assistant").count() == count
    page.click("#clear")
    assert page.locator("#talk .turn").count() == 0


def test_errors_are_said(page):
    setting(page, "max-tokens", 5000)
    page.click("#run")
    expect(page.locator("#talk .error")).to_contain_text("max_tokens", timeout=COMPILING)
    expect(page.locator("#run")).to_have_text("Run")
