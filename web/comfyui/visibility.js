// Hides the widgets that do not apply: an input's options may carry visible_if = {other widget: [values]}.

/** {widget name: {other widget: [values]}} of a node definition as the server sends it. */
export function conditionsOf(definition) {
  const conditions = {};
  for (const group of [definition?.input?.required, definition?.input?.optional]) {
    for (const [name, spec] of Object.entries(group ?? {})) {
      const wanted = Array.isArray(spec) ? spec[1]?.visible_if : undefined;
      if (wanted && Object.keys(wanted).length > 0) conditions[name] = wanted;
    }
  }
  return conditions;
}

/** A widget's value as Python's str() writes it, which is how the conditions are written. */
function text(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  return String(value);
}

/** Whether a condition holds; `values` lacks what only the run will know (a linked widget), and then it does. */
export function applies(condition, values) {
  return Object.entries(condition).every(
    ([other, wanted]) => !(other in values) || wanted.map(text).includes(text(values[other])),
  );
}

const rows = new WeakMap(); // hidden widget -> its own computeSize

function isLinked(node, name) {
  const slot = (node.inputs ?? []).findIndex((input) => input.widget?.name === name);
  return slot >= 0 && Boolean(node.isInputConnected?.(slot));
}

const NO_ROW = () => [0, -4]; // -4 cancels the gap between rows: frontend 1.27 keeps a hidden widget's place

function hide(widget, hidden) {
  widget.hidden = hidden;
  if (widget.options) widget.options.hidden = hidden; // where older Vue nodes look
  if (hidden) {
    rows.set(widget, widget.computeSize);
    widget.computeSize = NO_ROW;
  } else if (widget.computeSize === NO_ROW) {
    widget.computeSize = rows.get(widget);
  }
}

/** Show or hide the node's widgets; values and their places in the saved graph stay. Returns whether anything changed. */
export function applyVisibility(node, conditions) {
  const values = {};
  for (const widget of node.widgets ?? []) {
    if (!isLinked(node, widget.name)) values[widget.name] = widget.value;
  }
  let changed = false;
  for (const widget of node.widgets ?? []) {
    const condition = conditions[widget.name];
    if (!condition) continue;
    const hidden = !applies(condition, values) && !isLinked(node, widget.name);
    if (Boolean(widget.hidden) === hidden) continue;
    hide(widget, hidden);
    changed = true;
  }
  return changed;
}

/** Let the node's height follow the rows that came or went; what the user added by dragging stays. */
function fit(node, change) {
  node.setSize?.([node.size[0], Math.max(node.size[1] + change, node.computeSize()[1])]);
  node.setDirtyCanvas?.(true, true);
}

/** Re-evaluate whenever a widget, a link or the whole node changes. */
export function watchVisibility(node, conditions) {
  const update = () => {
    const before = node.computeSize()[1];
    if (applyVisibility(node, conditions)) fit(node, node.computeSize()[1] - before);
  };
  const chain = (name, then) => {
    const original = node[name];
    node[name] = function (...args) {
      const result = original?.apply(this, args);
      then();
      return result;
    };
  };
  const controls = new Set(Object.values(conditions).flatMap((condition) => Object.keys(condition)));
  for (const widget of node.widgets ?? []) {
    if (!controls.has(widget.name)) continue;
    const callback = widget.callback;
    widget.callback = function (...args) {
      const result = callback?.apply(this, args);
      update();
      return result;
    };
  }
  chain("onConnectionsChange", update);
  // A loaded or pasted node brings its own size, which fits the widgets it was saved with.
  chain("onConfigure", () => applyVisibility(node, conditions) && fit(node, 0));
  if (applyVisibility(node, conditions)) fit(node, -node.size[1]);
}
