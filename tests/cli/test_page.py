"""`inspect --html`: the page in a real browser (skipped where there is none): renders, no error, search, sort, shard map."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from converters.formats import open_checkpoint
from converters.overview.page import checkpoint_page
from distckpt_cli.app import main
from harness.support import GOLDEN

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MIXTRAL = GOLDEN / "mixtral_adam_ep2tp2"
ASK = """<script>
addEventListener("load", () => {
  const answer = { ready: document.body.dataset.ready, tiles: document.querySelectorAll("#map button").length };
  document.getElementById("search").value = "ROUTER layers.1.";
  const light = text => {
    const linear = n => n <= .04045 ? n / 12.92 : ((n + .055) / 1.055) ** 2.4;
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map(n => linear(n / 255));
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const contrast = node => {
    const style = getComputedStyle(node);
    const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
    return (a + .05) / (b + .05);
  };
  answer.contrast = Math.min(...[document.body, ...document.querySelectorAll("#map button")].map(contrast));
  answer.back = light(getComputedStyle(document.body).backgroundColor);
  const names = [...document.querySelectorAll(".row .name")];
  answer.cut = names.filter(node => node.scrollWidth > node.clientWidth || node.scrollHeight > node.clientHeight + 2).length;
  document.getElementById("search").dispatchEvent(new Event("input"));
  answer.nodes = document.querySelectorAll("*").length;
  answer.rows = document.querySelectorAll(".row").length;
  answer.count = document.getElementById("count").textContent;
  document.querySelector("[data-sort='3']").click();
  answer.first = document.querySelector(".row .name").textContent;
  document.querySelector(".row").click();
  answer.pieces = document.querySelectorAll("#pieces rect").length;
  answer.hover = document.getElementById("hover").textContent;
  answer.sideways = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  const box = document.createElement("pre");
  box.id = "answer";
  box.textContent = JSON.stringify(answer);
  document.body.append(box);
});
</script>"""


def opened(page, tmp_path, width=1200, *, dark=False):
    """What the browser's own script says of the page, and its console's lines."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"{ASK}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    flags.append(f"--window-size={width},900")
    flags.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, path.as_uri()], capture_output=True, text=True, check=True)
    (answer,) = re.findall(r'<pre id="answer">(.*?)</pre>', done.stdout)
    return json.loads(html.unescape(answer)), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)])
def test_the_page_in_a_browser(width, dark, tmp_path):
    answer, console = opened(checkpoint_page(open_checkpoint(MIXTRAL)), tmp_path, width, dark=dark)
    assert console == []
    assert answer["ready"] == "yes"
    assert answer["tiles"] >= 8
    assert answer["rows"] == 4  # the weight, its master, both moments
    assert answer["count"].startswith("4 tensors, ")
    assert answer["first"].startswith("optimizer.state.")  # the largest first
    assert answer["pieces"] == 1
    assert not answer["sideways"]
    assert (answer["back"] < 0.1) == dark
    assert answer["contrast"] >= 4.5  # WCAG AA, of tiles in all colours
    assert answer["cut"] == 0  # whole names, also on a narrow screen


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_100_000_tensors_do_not_freeze_it(tmp_path):
    page = checkpoint_page(open_checkpoint(MIXTRAL))
    head, text, tail = re.fullmatch(
        r"(.*?<script type=\"application/json\" id=\"data\">)(.*?)(</script>.*)", page, re.S
    ).groups()
    data = json.loads(text)
    data["tensors"] = [[f"{t[0]}.{n}", *t[1:]] for n in range(1000) for t in data["tensors"]][:100_000]
    answer, console = opened(head + json.dumps(data).replace("<", "\\u003c") + tail, tmp_path)
    assert console == []
    assert 0 < answer["rows"] < 100  # rows that are in sight, not all
    assert answer["nodes"] < 5000  # nor all tiles: what a browser has to lay out does not grow with the tensors


def test_a_page_needs_no_network_and_no_text_of_a_checkpoint_is_markup(tmp_path, capsys):
    hostile = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(MIXTRAL / "iter_0000010", hostile)
    answer = tmp_path / "verify.json"
    assert main(["verify", str(hostile), "--json", "-q"]) == 0
    answer.write_text(capsys.readouterr().out)
    out = tmp_path / "page.html"
    assert main(["inspect", str(hostile), "--html", str(out), "--verification", str(answer)]) == 0
    page = out.read_text()
    assert "<img" not in page
    template = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttp", template)
    assert "master weights round to the weights" in page
    assert main(["inspect", str(hostile), "--html", str(tmp_path / "no" / "page.html")]) == 5
    assert main(["inspect", str(MIXTRAL), str(hostile), "--html", str(out)]) == 2
