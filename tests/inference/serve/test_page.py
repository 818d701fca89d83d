"""The script of the page, run by Node with elements that show nothing."""

import json
import shutil
import subprocess

import pytest

pytest.importorskip("starlette")

from shardformer.inference.serve.app import PAGE

NODE = shutil.which("node")
BROWSER = """
const elements = {};
const makeElement = () => ({value: "", style: {}, dataset: {}, append() {}, replaceChildren() {}, scrollIntoView() {},
                            focus() {}, remove() {}});
globalThis.document = {getElementById: id => elements[id] ||= makeElement(), createElement: makeElement};
globalThis.localStorage = {getItem: () => null, setItem() {}};
globalThis.fetch = async (url, {signal}) => signal ? new Promise((_, reject) =>
  signal.addEventListener("abort", () => reject(signal.reason))) : {ok: false};
"""
TALK = """
current.turns.push({kind: "user", text: "a"}, {kind: "assistant", text: "b"});
openConversation(current);
$("mode").value = "chat";
$("text").value = "c";
const sent = send({preventDefault() {}});
ACTION;
sent.then(() => console.log(JSON.stringify([messages.map(one => one.role), current.turns.length])));
"""
TURN = ["user", "assistant"]


@pytest.mark.skipif(not NODE, reason="no node on the PATH")
@pytest.mark.parametrize(
    ("action", "roles", "turns"),
    [("openConversation(current)", TURN, 2), ("openConversation(newConversation())", [], 0),
     ("running.abort()", TURN * 2, 4)],
)  # fmt: skip
def test_answer_goes_to_the_conversation_that_asked(action, roles, turns):
    script = PAGE.read_text("utf-8").split("<script>")[1].split("</script>")[0]
    ran = subprocess.run([NODE, "-"], input=BROWSER + script + TALK.replace("ACTION", action), capture_output=True,
                         text=True, check=True, timeout=60)  # fmt: skip
    assert json.loads(ran.stdout) == [roles, turns]
