"use strict";
// The token view: a click on a token opens its step, with the draft tree that the step verified.
//
// The block #steps holds
//   phases   [label, colour, colour on a dark page] of the numbers in a step's ms
//   texts    the text of each token
//   outputs  the steps of each output, by REQUEST/ARM/SEQUENCE: forward, why, facts, ms and, where it was recorded, tree:
//            tokens, parents (-1: the root), p, q, accept of each node; illegal, forced and path (the accepted ones) are
//            places of nodes; emitted, origins, kept (how many are left) and emitted_p are those of the emitted tokens;
//            noise: whether accept is given the noise that draft and target share; failed: the step was not verified
{
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 28, MARK = 13; // px: a row of the tree, the x of the root's mark
  const MOST_ROWS = 1000;
  const OUTCOMES = {
    accepted: ["✓", "accepted"], cut: ["✓", "accepted"], rejected: ["✗", "rejected"], illegal: ["⊘", "not allowed"],
    passed: ["–", "not taken"], below: ["–", "not reached"], bonus: ["◆", "bonus"], recovered: ["◆", "recovered"],
    forced: ["◆", "forced"], emitted: ["◆", "sampled"], root: ["", ""],
  };
  const LEGEND = "✓ accepted, ✗ rejected, – not taken or not reached, ⊘ not allowed, ◆ emitted after the accepted path";
  const block = document.getElementById("steps");
  const view = document.getElementById("prompts");
  const arms = document.getElementById("arm");
  const data = JSON.parse(block.textContent);
  const outputs = new Map([...document.querySelectorAll(".output")].map((one) => [one.dataset.output, one]));
  let open = null; // {output: where the pane is, key, place: number of the step among its output's}
  const pane = make("div", { class: "step", role: "region", "aria-label": "Step" });

  function make(tag, attributes = {}, ...children) {
    const one = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    one.append(...children);
    return one;
  }

  function drawn(tag, attributes) {
    const one = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
    return one;
  }

  // The rows of a tree, depth first: its root, nodes, and first below the accepted path's end what was emitted there.
  function rowsOf(tree) {
    const accepted = new Set(tree.path), illegal = new Set(tree.illegal), forced = new Set(tree.forced);
    const end = tree.path.length ? tree.path[tree.path.length - 1] : -1;
    const below = new Map();
    tree.parents.forEach((parent, node) => {
      if (!below.has(parent)) below.set(parent, []);
      below.get(parent).push(node);
    });
    const outcome = (node) => {
      if (accepted.has(node)) return tree.path.indexOf(node) < tree.kept ? "accepted" : "cut";
      if (tree.failed) return "below";
      if (illegal.has(node)) return "illegal";
      const parent = tree.parents[node];
      if (parent === end) return "rejected";
      return parent === -1 || accepted.has(parent) ? "passed" : "below";
    };
    const rows = [{ depth: 0, parent: -1, text: "text so far", kind: "root" }];
    const emitted = (depth, parent) => {
      for (let place = tree.path.length; place < tree.emitted.length; place++) {
        const origin = tree.tokens.length || tree.origins[place] === "forced" ? tree.origins[place] : "emitted";
        rows.push({
          depth, parent, text: data.texts[tree.emitted[place]], kind: origin in OUTCOMES ? origin : "emitted",
          p: place === tree.path.length ? tree.emitted_p : null, cut: place >= tree.kept,
        });
        parent = rows.length - 1;
        depth += 1;
      }
    };
    // A stack, since trees may be deeper than a script's calls. A null stands for what was emitted.
    const stack = [[-1, 0, 0]];
    while (stack.length) {
      const [node, depth, row] = stack.pop();
      if (node === null) {
        emitted(depth, row);
        continue;
      }
      let own = row;
      if (node >= 0) {
        rows.push({
          depth, parent: row, text: data.texts[tree.tokens[node]], kind: outcome(node), p: tree.p[node], q: tree.q[node],
          accept: tree.accept[node], single: forced.has(node), cut: tree.path.indexOf(node) >= tree.kept,
        });
        own = rows.length - 1;
      }
      for (const child of [...(below.get(node) ?? [])].reverse()) stack.push([child, depth + 1, own]);
      if (node === end) stack.push([null, depth + 1, own]);
    }
    return rows;
  }

  function number(value) {
    if (value === null || value === undefined) return "";
    if (value === 0 || value === 1) return String(value);
    const text = value < 0.001 ? value.toExponential(1) : value < 0.1 ? value.toPrecision(2) : value.toFixed(2);
    return text !== "1.00" ? text : value < 0.99995 ? value.toFixed(4) : ">0.9999";
  }

  function mark(kind, x, y) {
    const r = 5;
    if (kind === "rejected") {
      return drawn("path", { class: kind, d: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}` });
    }
    if (kind === "illegal") {
      const group = drawn("g", { class: kind });
      group.append(drawn("circle", { cx: x, cy: y, r }), drawn("path", { d: `M${x - 3.5} ${y + 3.5}l7 -7` }));
      return group;
    }
    if (["bonus", "recovered", "forced", "emitted"].includes(kind)) {
      return drawn("path", { class: kind, d: `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z` });
    }
    return drawn("circle", { class: kind, cx: x, cy: y, r: kind === "below" ? 3 : r });
  }

  function treeOf(tree) {
    const every = rowsOf(tree), rows = every.slice(0, MOST_ROWS), deepest = Math.max(...rows.map((row) => row.depth), 1);
    const indent = Math.min(18, Math.max(3, 170 / deepest));
    const x = (row) => MARK + row.depth * indent, y = (place) => (place + 1.5) * ROW;
    const svg = drawn("svg", { width: MARK + deepest * indent + 12, height: (rows.length + 1) * ROW, "aria-hidden": "true" });
    const body = make("tbody");
    const edges = rows.map((row, place) => {
      const above = rows[row.parent];
      const taken = !["rejected", "illegal", "passed", "below"].includes(row.kind);
      const d = place ? `M${x(above)} ${y(row.parent)}V${y(place)}H${x(row)}` : "M0 0";
      return { taken, edge: drawn("path", { class: taken ? "edge taken" : "edge", d }) };
    });
    svg.append(...[...edges].sort((a, b) => a.taken - b.taken).map((one) => one.edge));
    rows.forEach((row, place) => {
      svg.append(mark(row.kind, x(row), y(place)));
      const [sign, word] = OUTCOMES[row.kind];
      const token = make("th", { scope: "row", class: "token", style: `padding-left: ${x(row) + 11}px` });
      token.append(make("bdi", {}, row.text));
      const cells = ["p", "q", "accept"].map((name) => {
        const share = Math.round(100 * Math.min(1, Math.max(0, row[name] ?? 0)));
        return make("td", { class: `share ${name}`, style: `--share: ${share}%` }, number(row[name]));
      });
      const more = [...(row.single ? ["forced"] : []), ...(row.cut ? ["cut"] : [])];
      const said = make("td", { class: "outcome" }, `${sign} `, make("span", {}, word + (more.length ? ", " : "")), more.join(", "));
      body.append(make("tr", { class: row.kind }, token, ...cells, said));
    });
    const titles = [
      ["token", "drafted token; siblings stand in the order drawn"], ["p", "target probability given the path above"],
      ["q", "draft probability given the path above; empty where the token was not sampled"],
      ["accept", `probability that the token is accepted, given ${tree.noise ? "the shared noise and " : ""}that its parent is`],
      ["outcome", "what the step did"],
    ];
    const head = make("tr", {}, ...titles.map(([name, title]) => make("th", { scope: "col", title }, name)));
    return make("div", { class: "tree", tabindex: "0", role: "group", "aria-label": "Draft tree" },
      make("div", {}, svg, make("table", {}, make("thead", {}, head), body)),
      ...(every.length > rows.length ? [`and ${every.length - rows.length} more rows`] : []));
  }

  function phasesOf(ms) {
    const whole = ms.reduce((a, b) => a + b, 0);
    const bar = make("div", { class: "phases", "aria-hidden": "true" });
    const list = make("ul", { class: "phases" });
    ms.forEach((value, place) => {
      if (!value) return;
      const [label, light, dark] = data.phases[place], colours = `--light: ${light}; --dark: ${dark}`;
      bar.append(make("i", { style: `width: ${(100 * value) / whole}%; ${colours}`, title: `${label} ${value} ms` }));
      list.append(make("li", {}, make("i", { style: colours }), `${label} ${value.toFixed(2)} ms`));
    });
    list.append(make("li", {}, `whole step ${whole.toFixed(2)} ms`));
    return whole ? [bar, list] : [];
  }

  function button(text, label, disabled, act) {
    const one = make("button", { type: "button", "aria-label": label, title: label }, text);
    one.disabled = disabled;
    one.addEventListener("click", act);
    return one;
  }

  function show(output, key, place, scroll) {
    const steps = data.outputs[key], step = steps[place];
    const within = pane.contains(document.activeElement), focused = document.activeElement.getAttribute("aria-label");
    close();
    open = { output, key, place };
    if (arms && arms.value !== output.dataset.arm) {
      arms.value = output.dataset.arm;
      arms.dispatchEvent(new Event("change"));
    }
    const hash = `#step=${key}/${step.forward}`;
    const link = make("a", { href: hash }, "link");
    const go = (to) => () => { show(output, key, to); };
    pane.replaceChildren(
      make("p", { class: "bar" },
        button("◀", "Previous step", place === 0, go(place - 1)),
        make("b", {}, ` Step ${place + 1} of ${steps.length} `),
        button("▶", "Next step", place === steps.length - 1, go(place + 1)),
        link, button("✕", "Close", false, () => { close(); history.replaceState(null, "", "#prompts"); })),
      make("p", { class: "why", "aria-live": "polite" }, step.why || "The draft tree of this step was not recorded."),
      make("p", { class: "how" }, step.facts), ...phasesOf(step.ms),
      ...(step.tree ? [treeOf(step.tree), make("p", { class: "legend how", "aria-hidden": "true" }, LEGEND)] : []));
    output.classList.add("open");
    output.append(pane);
    const own = `${key.slice(key.lastIndexOf("/") + 1)}/${step.forward}`;
    const spans = [...output.querySelectorAll("[data-step]")].filter((one) => one.dataset.step === own);
    spans.forEach((one) => one.classList.add("on"));
    const text = output.querySelector("pre");
    if (spans.length) { // within the text alone: the page stays where it is
      const inside = spans[0].offsetTop - text.offsetTop;
      if (inside < text.scrollTop || inside > text.scrollTop + text.clientHeight - 40) text.scrollTop = inside - 60;
    }
    if (within) { // the control that had the focus is a new one
      const same = focused && pane.querySelector(`[aria-label="${CSS.escape(focused)}"]:not(:disabled)`);
      (same || text).focus({ preventScroll: true });
    }
    if (scroll) output.closest("article").scrollIntoView();
    history.replaceState(null, "", hash);
  }

  function close() {
    if (!open) return;
    open.output.classList.remove("open");
    for (const one of open.output.querySelectorAll(".on")) one.classList.remove("on");
    pane.remove();
    open = null;
  }

  // Open the step that the address names, as #step=REQUEST/ARM/SEQUENCE/FORWARD.
  function follow() {
    const [, key, forward] = /^#step=(.+)\/(\d+)$/.exec(location.hash) ?? [];
    const place = (data.outputs[key] ?? []).findIndex((step) => step.forward === Number(forward));
    if (place >= 0 && outputs.has(key) && !(open && open.key === key && open.place === place)) {
      show(outputs.get(key), key, place, true);
    }
  }

  view.addEventListener("click", (event) => {
    const span = event.target.closest("[data-step]"), output = event.target.closest(".output");
    if (!span || String(getSelection())) return; // text is being marked
    const [sequence, forward] = span.dataset.step.split("/");
    const key = output.dataset.output.replace(/[^/]*$/, sequence);
    const place = (data.outputs[key] ?? []).findIndex((step) => step.forward === Number(forward));
    if (place >= 0) show(output, key, place);
  });
  view.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], output = event.target.closest(".output");
    if (!output || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const here = open && open.output === output;
    if (event.key === "Escape" && here) close();
    if (!here && (event.key === "Enter" || way === 1) && data.outputs[output.dataset.output]) {
      show(output, output.dataset.output, 0);
      event.preventDefault();
    } else if (here && way) {
      const place = open.place + way;
      event.preventDefault();
      if (place >= 0 && place < data.outputs[open.key].length) show(output, open.key, place);
    }
  });
  for (const output of outputs.values()) {
    if (data.outputs[output.dataset.output]) output.querySelector("pre").tabIndex = 0;
  }
  addEventListener("hashchange", follow);
  follow();
}
