// The ComfyUI frontend extension: live panels on the nodes that decode, and widgets that hide where they do not apply.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { LivePanel, Progress } from "./live.js";
import { conditionsOf, watchVisibility } from "./visibility.js";

const PREFIX = "Foredraft";
const LIVE = new Set(["ForedraftSampler", "ForedraftCompare"]);
const WIDGET = "foredraft_live";
const KEPT = 64;

const conditions = new Map(); // node id -> visibility conditions
const panels = new WeakMap(); // node -> LivePanel
const records = new Map(); // graph and node -> Progress; outlives the node objects, which undo and tab changes rebuild

function language() {
  const locale = app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en";
  return String(locale).startsWith("zh") ? "zh" : "en";
}

function recordKey(node) {
  return `${node.graph?.id ?? ""}/${node.id}`;
}

function recordOf(node) {
  const key = recordKey(node);
  const record = records.get(key) ?? new Progress();
  records.delete(key);
  records.set(key, record);
  if (records.size > KEPT) records.delete(records.keys().next().value);
  return record;
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
  const panel = panels.get(node);
  if (!panel) return;
  const before = panel.minHeight;
  panel.update(record);
  if (panel.minHeight > before) grow(node, panel.minHeight - before);
}

function grow(node, height) {
  if (height > 0) node.setSize?.([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
  node.setDirtyCanvas?.(true, true);
}

function addPanel(node) {
  const panel = new LivePanel(language());
  panels.set(node, panel);
  const widget = node.addDOMWidget(WIDGET, "foredraft", panel.root, {
    serialize: false, // not in the prompt
    hideOnZoom: false,
    getMinHeight: () => panel.minHeight,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false; // not in the saved graph
}

app.registerExtension({
  name: "Foredraft",

  setup() {
    api.addEventListener("foredraft.progress", ({ detail }) => {
      const node = nodeOf(detail.node);
      if (!node || !panels.has(node)) return;
      const record = recordOf(node);
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
    const found = conditions.get(id);
    if (found) watchVisibility(node, found);
  },

  loadedGraphNode(node) {
    if (panels.has(node) && records.has(recordKey(node))) show(node, recordOf(node));
  },
});
