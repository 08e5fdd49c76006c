// The ComfyUI frontend extension: live panels on the nodes that decode, and widgets that hide where they do not apply.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { LivePanel, Progress, textBox } from "./live.js";
import { conditionsOf, watchVisibility } from "./visibility.js";

const PREFIX = "Foredraft";
const LIVE = new Set(["ForedraftSampler", "ForedraftCompare"]);
const TEXT = new Set(["ForedraftTraceStats"]);
const TEXT_HEIGHT = 96;
const KEPT = 64;

const conditions = new Map(); // node id -> visibility conditions
const panels = new WeakMap(); // node -> LivePanel
const boxes = new WeakMap(); // node -> the element of its text
// Graph and node -> what it showed last; they outlive the node objects, which undo and tab changes rebuild.
const records = new Map();
const texts = new Map();

function language() {
  const locale = app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en";
  return String(locale).startsWith("zh") ? "zh" : "en";
}

function recordKey(node) {
  return `${node.graph?.id ?? ""}/${node.id}`;
}

function remember(map, node, value) {
  const key = recordKey(node);
  map.delete(key);
  map.set(key, value);
  if (map.size > KEPT) map.delete(map.keys().next().value);
  return value;
}

/** The node of an execution id: "5", or "12:5" for node 5 inside subgraph node 12. */
function nodeOf(executionId) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(executionId).split(":")) {
    node = graph?.getNodeById?.(part) ?? graph?.getNodeById?.(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

function show(node, record) {
  panels.get(node)?.update(record);
  node.setDirtyCanvas?.(true, true); // lays the node out again: the panel may have become higher
}

/** A DOM widget that is neither in the prompt nor in the saved graph. */
function addElement(node, name, root, height) {
  const options = { serialize: false, hideOnZoom: false, getMinHeight: height, getValue: () => "", setValue: () => {} };
  node.addDOMWidget(name, "foredraft", root, options).serialize = false;
}

function addPanel(node) {
  const panel = new LivePanel(language());
  panels.set(node, panel);
  addElement(node, "foredraft_live", panel.root, () => panel.minHeight);
}

/** Shows the lines of `ui.text`, which the frontend itself shows on its own nodes only. */
function addText(node) {
  const box = textBox();
  addElement(node, "foredraft_text", box, () => TEXT_HEIGHT);
  const onExecuted = node.onExecuted;
  node.onExecuted = function (output) {
    onExecuted?.apply(this, arguments);
    if (output?.text) box.textContent = remember(texts, node, [output.text].flat().join("\n"));
  };
  boxes.set(node, box);
}

app.registerExtension({
  name: "Foredraft",

  setup() {
    api.addEventListener("foredraft.progress", ({ detail }) => {
      const node = nodeOf(detail.node);
      if (!node || !panels.has(node)) return;
      const record = remember(records, node, records.get(recordKey(node)) ?? new Progress());
      record.take(detail);
      show(node, record);
    });
    // A node that comes from the cache sends nothing and keeps its map.
    api.addEventListener("execution_start", () => records.forEach((record) => (record.stale = true)));
    const stop = ({ detail }) => {
      const node = detail?.node_id == null ? null : nodeOf(detail.node_id);
      const record = node && records.get(recordKey(node));
      if (!record) return;
      record.stopped = true;
      show(node, record);
    };
    api.addEventListener("execution_interrupted", stop);
    api.addEventListener("execution_error", stop);
  },

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith(PREFIX)) return;
    const found = conditionsOf(nodeData);
    if (Object.keys(found).length > 0) conditions.set(nodeData.name, found);
  },

  nodeCreated(node) {
    const id = node.comfyClass ?? node.type;
    if (!id?.startsWith?.(PREFIX)) return;
    if (LIVE.has(id)) addPanel(node);
    if (TEXT.has(id)) addText(node);
    const found = conditions.get(id);
    if (found) watchVisibility(node, found);
  },

  loadedGraphNode(node) {
    const key = recordKey(node);
    if (records.has(key)) show(node, records.get(key));
    if (boxes.has(node)) boxes.get(node).textContent = texts.get(key) ?? "";
  },
});
