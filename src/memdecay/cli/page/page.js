"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const el = (tag, attrs, ...kids) => {
    const node = document.createElement(tag);
    for (const [k, v] of Object.entries(attrs || {})) {
      if (k === "class") node.className = v;
      else if (k === "style") node.style.cssText = v;
      else node.setAttribute(k, v);
    }
    for (const kid of kids) if (kid !== null && kid !== undefined) node.append(kid);
    return node;
  };
  const svg = (tag, attrs, ...kids) => {
    const node = document.createElementNS($("ns").namespaceURI, tag);
    for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
    node.append(...kids);
    return node;
  };
  const n = (x) => x.toLocaleString("en-US");
  const bytes = (b) => (b >= 1e9 ? [(b / 1e9).toFixed(2), " GB"] : [(b / 1e6).toFixed(b < 1e8 ? 1 : 0), " MB"]);
  const signed = (x, d = 3) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(d);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The seven regions keep their colour everywhere; regions the user named take the spare ones.
  const KNOWN = { system: "#3a66d6", plan: "#9a63dd", user: "#12a5b0", tool_in: "#d9ab25", tool_out: "#e8703a", retrieval: "#4fa84a", scratchpad: "#8f96a3" };
  const SPARE = ["#cf4f8c", "#8a6a45", "#6d8f1f", "#5f7fae", "#b34a4a"];
  const colours = D.regions.map((name, i) => (Object.hasOwn(KNOWN, name) ? KNOWN[name] : SPARE[i % SPARE.length]));
  const colourOf = (name) => colours[D.regions.indexOf(name)] || KNOWN[name] || KNOWN.scratchpad;

  // ---- data -> lookups
  // A strip is a page, or neighbouring small pages of one region; [start, end) are its tokens.
  const STRIP = 16, HERE = 0, FEWER = 1, DISK = 3, LOST = 4, TIERS = ["kept", "kept, at fewer bits", "outside, in memory", "outside, on disk", "lost"];
  // Where page `at` of a strip is after event e.
  const tierAt = (s, at, e) => {
    if (!s.moves) return s.evicted[at] >= 0 && s.evicted[at] <= e ? LOST : HERE;
    let tier = HERE;
    for (let i = 0; i < s.moves[at].length && s.moves[at][i] <= e; i += 2) tier = s.moves[at][i + 1];
    return tier;
  };
  for (const run of D.runs) {
    const t = run.timeline, each = t.page_size, list = (x, k) => (Array.isArray(x) ? x : Array(k).fill(x));
    run.strips = t.strips.map(([page, pages, region, tokens, pinned, born, evicted, moves]) => ({
      page, pages, region, tokens, pinned: !!pinned, start: page * each, end: (page + pages) * each,
      born: list(born, pages), evicted: list(evicted, pages), levels: t.levels[page] || [], refreshed: t.refreshed[page] || [],
      moves: moves && (Array.isArray(moves[0]) ? moves : Array(pages).fill(moves)),
    }));
    for (const s of run.strips) {
      // [event, change in the number of pages that are there, of those at fewer bits, outside in memory, outside on disk], in order of events
      const changes = new Map();
      const change = (e, tier, by) => {
        if (!changes.has(e)) changes.set(e, [0, 0, 0, 0]);
        if (tier < LOST) changes.get(e)[tier] += by;
        if (tier === FEWER) changes.get(e)[HERE] += by;
      };
      s.born.forEach((e, at) => {
        change(e, HERE, 1);
        if (s.moves) for (let i = 0, before = HERE; i < s.moves[at].length; i += 2) { change(s.moves[at][i], before, -1); before = s.moves[at][i + 1]; change(s.moves[at][i], before, 1); }
        else if (s.evicted[at] >= 0) change(s.evicted[at], HERE, -1);
      });
      s.changes = [...changes].map(([e, by]) => [e, ...by]).sort((a, b) => a[0] - b[0]);
      s.last = s.evicted.includes(-1) ? -1 : s.evicted.reduce((a, b) => Math.max(a, b), -1);
      s.back = new Set((s.moves || []).flatMap((m) => m.filter((e, i) => i % 2 === 0 && m[i + 1] <= FEWER && (i ? m[i - 1] : HERE) > FEWER))).size;
    }
    run.tiered = run.strips.some((s) => s.moves);
    run.graded = run.strips.some((s) => (s.moves || []).some((m) => m.some((tier, i) => i % 2 && tier === FEWER)));
    run.seenAt = (e) => (t.events.length ? t.events[Math.min(e, t.events.length - 1)][0] : 0);
  }
  const seenMax = Math.max(1, D.seen_tokens, ...D.runs.map((r) => r.seenAt(1e9)));
  const numTokens = Math.max(1, ...D.runs.map((r) => r.strips.reduce((most, s) => Math.max(most, s.end), 0)));

  // ---- words
  $("headline").textContent = D.headline;
  $("standfirst").textContent = D.standfirst;
  document.title = D.title;
  for (const [k, v] of D.facts) $("facts").append(el("div", {}, el("dt", {}, k), el("dd", {}, v)));
  $("strips").hidden = !D.runs.some((r) => r.strips.some((s) => s.pages > 1));
  $("footer").textContent = D.footer;
  if (D.notes.length) {
    $("notes").hidden = false;
    for (const note of D.notes) $("notelist").append(el("li", {}, note));
  }

  // ---- cards
  for (const run of D.runs) {
    const right = run.answers.filter((a) => a.correct).length;
    const num = (big, small, label) => el("div", { class: "num" }, el("b", {}, big, el("small", {}, small)), el("span", {}, label));
    const nums = el("div", { class: "nums" });
    if (run.answers.length) nums.append(num(String(right), ` / ${run.answers.length}`, "answers right"));
    if (run.cost && run.cost.delta_nll_per_token !== null) {
      nums.append(num(signed(run.cost.delta_nll_per_token), "", "Δ NLL per token"));
      nums.append(num((100 * run.cost.top1_agreement).toFixed(1), "%", "same top token"));
    }
    nums.append(num(n(run.peak_tokens), run.cost ? "" : ` of ${n(run.seen_tokens)}`, run.cost ? "peak tokens" : "tokens at the peak"));
    if (run.peak_bytes) nums.append(num(...bytes(run.peak_bytes), "peak KV"));
    let places = null;
    if (run.tiers) {
      const { tokens, bytes: size } = run.tiers, named = { resident: "at full precision", quantized: `at ${run.bits} bits`, host: "in memory", disk: "on disk" };
      nums.append(num(n(run.tiers.came_back), "", "pages came back"));
      places = el("p", { class: "what" }, "Tokens at the end: " + Object.keys(named).filter((k) => size[k] && (tokens[k] || tokens.copies)).map((k) => `${n(tokens[k])} ${named[k]} (${bytes(size[k]).join("")})`).join(", ") + (tokens.copies ? `; exact copies of ${n(tokens.copies)} at ${run.bits} bits are among what is outside.` : "."));
    }
    const dots = run.answers.length ? el("div", { class: "dots" }, ...run.answers.map((a) =>
      el("i", { class: a.correct ? "good" : "bad", title: `${a.where}: ${a.correct ? "right" : "wrong"}` }, `${a.correct ? "✓" : "✗"} ${a.short}`))) : null;
    $("cards").append(el("article", { class: run.main ? "card main" : "card" }, el("h3", {}, run.policy), el("p", { class: "what" }, run.summary), nums, places, dots));
  }

  // ---- legend
  const legend = $("legend");
  for (const [i, name] of D.regions.entries())
    if (D.runs.some((r) => (r.seen[name] || 0) > 0)) legend.append(el("li", {}, el("span", { class: "swatch", style: `background:${colours[i]}` }), name));
  const glyph = (...kids) => svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, ...kids);
  legend.append(
    el("li", {}, el("span", { class: "fade", style: `background:linear-gradient(90deg,${KNOWN.tool_out},${KNOWN.tool_out}2e)` }), "score falls"),
    el("li", {}, glyph(svg("rect", { x: 1, y: 2, width: 20, height: 8, fill: KNOWN.system, stroke: "currentColor", "stroke-width": 1.4 })), "pinned"),
    el("li", {}, glyph(svg("rect", { x: 1, y: 2, width: 20, height: 8, fill: KNOWN.tool_out, opacity: .4 }), svg("circle", { cx: 11, cy: 6, r: 2.6, fill: "currentColor" })), "refreshed by attention"),
    el("li", {}, glyph(svg("rect", { x: 1, y: 2, width: 11, height: 8, fill: KNOWN.tool_out, opacity: .4 }), svg("rect", { x: 12, y: 1, width: 2, height: 10, fill: "currentColor" })), "evicted"),
  );
  if (D.runs.some((r) => r.strips.some((s) => s.pages > 1)))
    legend.append(el("li", {}, glyph(svg("path", { d: "M1 2H21V4H14V7H8V10H1Z", fill: KNOWN.tool_out })), "some tokens evicted"));

  const tiered = D.runs.some((r) => r.tiered), onDisk = D.runs.some((r) => r.strips.some((s) => (s.moves || []).some((m) => m.some((tier, i) => i % 2 && tier === DISK))));
  $("tiers").hidden = !tiered;
  $("graded").hidden = !D.runs.some((r) => r.graded);
  if (D.runs.some((r) => r.graded)) legend.append(el("li", {}, glyph(...Array.from({ length: 8 }, (_, i) => svg("rect", { x: 3 * i, y: 2, width: 1.5, height: 8, fill: KNOWN.tool_out }))), "at fewer bits"));
  if (tiered) legend.append(el("li", {}, glyph(svg("rect", { x: 0, y: 5, width: 22, height: 2, fill: KNOWN.tool_out })), "outside, in memory"));
  if (onDisk) legend.append(el("li", {}, glyph(...[0, 5, 10, 15, 20].map((x) => svg("rect", { x, y: 5, width: 2, height: 2, fill: KNOWN.tool_out }))), "outside, on disk"));
  if (tiered) legend.append(el("li", {}, glyph(svg("rect", { x: 0, y: 5, width: 8, height: 2, fill: KNOWN.tool_out }), svg("rect", { x: 9, y: 2, width: 12, height: 8, fill: KNOWN.tool_out }), svg("path", { d: "M7 1L13 6L7 11Z", fill: "var(--good)" })), "came back"));

  // ---- panels
  const GUT = 46, PAD = 14, TOP = 104;
  const state = { axis: "seen", cursor: null, shown: new Set(), clip: 1 };
  const preferred = D.runs.filter((r) => r.bounded).slice(0, 2);
  for (const r of preferred.length ? preferred : D.runs.slice(0, 1)) state.shown.add(r.policy);
  for (const run of D.runs) {
    const chip = el("button", { type: "button" }, run.policy);
    chip.addEventListener("click", () => {
      if (state.shown.has(run.policy)) { if (state.shown.size > 1) state.shown.delete(run.policy); }
      else state.shown.add(run.policy);
      build();
    });
    run.chip = chip;
    if (D.runs.length > 1) $("chips").append(chip);
  }
  $("axis").addEventListener("change", (e) => { state.axis = e.target.value; build(); });

  let panels = [];
  const span = (run) => (state.axis === "seen" ? seenMax : Math.max(1, run.timeline.events.length - 1));
  const xOf = (run, e) => (state.axis === "seen" ? run.seenAt(e) : e);
  // A chunk brings several pages at once: each starts at its own first token, not at the chunk's end.
  const bornX = (run, s) => {
    const born = s.changes[0][0];
    if (state.axis === "event") return Math.max(0, born - 0.5);
    const before = born > 0 ? run.seenAt(born - 1) : 0;
    return Math.min(run.seenAt(born), Math.max(before, s.start));
  };
  const endX = (run, s) => (s.last < 0 || run.tiered ? span(run) : xOf(run, s.last));

  function build() {
    for (const run of D.runs) run.chip.setAttribute("aria-pressed", state.shown.has(run.policy));
    $("panels").replaceChildren();
    panels = D.runs.filter((r) => state.shown.has(r.policy)).map((run) => {
      const now = el("span", { class: "now" });
      const top = el("canvas", { class: "top", "aria-hidden": "true" });
      const rows = el("canvas", { tabindex: 0, role: "img", "aria-label": summary(run) });
      const over = el("canvas", { class: "over", "aria-hidden": "true" });
      const stage = el("div", { class: "stage" }, top, rows, over);
      $("panels").append(el("article", { class: "panel" }, el("header", {}, el("h3", {}, run.policy), now), stage));
      const panel = { run, now, top, rows, over, stage };
      rows.addEventListener("pointermove", (e) => hover(panel, e));
      rows.addEventListener("pointerdown", (e) => hover(panel, e));
      rows.addEventListener("pointerleave", leave);
      rows.addEventListener("keydown", (e) => step(panel, e));
      rows.addEventListener("blur", leave);
      stage.addEventListener("scroll", () => { for (const q of panels) if (q.stage.scrollTop !== stage.scrollTop) q.stage.scrollTop = stage.scrollTop; });
      return panel;
    });
    layout();
  }
  function summary(run) {
    const all = run.strips.reduce((sum, s) => sum + s.pages, 0), gone = run.strips.reduce((sum, s) => sum + s.evicted.filter((e) => e >= 0).length, 0);
    const what = run.timeline.page_size > 1 ? "pages" : "tokens";
    if (run.tiered) return `${run.policy}: ${n(all)} ${what}, ${n(gone)} of them outside at the end, at most ${n(run.peak_tokens)} tokens held. Arrow keys move through time.`;
    return `${run.policy}: ${n(all)} ${what}, ${n(gone)} of them evicted, at most ${n(run.peak_tokens)} tokens held. Arrow keys move through time.`;
  }
  function size(canvas, w, h) {
    const dpr = Math.min(window.devicePixelRatio || 1, h > 4000 ? 1 : 2);
    canvas.width = Math.round(w * dpr); canvas.height = Math.round(h * dpr); canvas.style.height = h + "px";
    const c = canvas.getContext("2d"); c.setTransform(dpr, 0, 0, dpr, 0, 0);
    return c;
  }
  function layout() {
    for (const p of panels) {
      p.w = p.stage.clientWidth;
      const numRows = numTokens / STRIP;
      p.rowH = Math.max(numRows > 1000 ? 1 : 1.5, Math.min(9, 560 / numRows));
      p.h = Math.min(12000, Math.ceil(p.rowH * numRows) + 10);
      p.rowH = (p.h - 10) / numRows;
      p.sx = (p.w - GUT - PAD) / span(p.run);
      drawTop(p); drawRows(p);
      p.overC = size(p.over, p.w, TOP + p.h);
      p.over.style.width = p.w + "px"; p.over.style.top = "0px"; p.over.style.marginTop = "0px";
    }
    cursor();
  }
  const panelScale = (run) => panels.find((p) => p.run === run).sx;
  const X = (p, v) => GUT + v * p.sx;

  function drawTop(p) {
    const c = size(p.top, p.w, TOP), run = p.run, ev = run.timeline.events;
    const soft = css("--soft"), ink = css("--ink"), base = TOP - 10, high = 38;
    c.font = "11.5px system-ui, sans-serif"; c.textBaseline = "alphabetic";
    const kMax = Math.max(1, ...D.runs.filter((r) => state.shown.has(r.policy)).map((r) => Math.max(r.peak_tokens, r.budget_tokens || 0)));
    const Y = (k) => base - (k / kMax) * (base - high - 4);
    let last = -1e9;
    for (const turn of turnsOf(run)) {
      const x = X(p, turn.x0), width = (turn.x1 - turn.x0) * p.sx;
      if (turn.line) { c.strokeStyle = css("--line"); c.beginPath(); c.moveTo(Math.round(x) + .5, 4); c.lineTo(Math.round(x) + .5, TOP); c.stroke(); }
      if (x - last < 3) continue;
      c.fillStyle = soft;
      const label = fit(c, turn.label, width - 6) || fit(c, String(turn.index + 1), width - 4);
      const number = !label && turn.line && x - last > 34 ? String(turn.index + 1) : "";
      if (number) { c.fillText(number, x + 3, 14); last = x + c.measureText(number).width; }
      if (label) { c.fillText(label, x + 4, 14); last = x + c.measureText(label).width; }
    }
    if (ev.length) {
      c.beginPath(); c.moveTo(X(p, state.axis === "seen" ? 0 : 0), base);
      let prev = base;
      ev.forEach((e, i) => { const x = X(p, xOf(run, i)); if (e[3] >= 2) c.lineTo(x, prev); c.lineTo(x, Y(e[1])); prev = Y(e[1]); });
      c.lineTo(X(p, span(run)), prev); c.lineTo(X(p, span(run)), base); c.closePath();
      c.fillStyle = ink; c.globalAlpha = .1; c.fill(); c.globalAlpha = .65; c.lineWidth = 1.2; c.strokeStyle = ink; c.stroke(); c.globalAlpha = 1;
    }
    c.fillStyle = soft; c.textAlign = "right";
    if (!run.budget_tokens || base - Y(run.budget_tokens) > 24) c.fillText("kept", GUT - 6, base - 2);
    if (run.budget_tokens) {
      const y = Math.round(Y(run.budget_tokens)) + .5;
      c.strokeStyle = css("--bad"); c.setLineDash([5, 4]); c.beginPath(); c.moveTo(GUT, y); c.lineTo(p.w - PAD, y); c.stroke(); c.setLineDash([]);
      c.fillStyle = css("--bad"); c.textAlign = "right"; c.fillText(n(run.budget_tokens), GUT - 6, y + 4);
      c.textAlign = "left"; c.fillText(run.graded ? "budget, at full precision" : "budget", GUT + 4, y - 5);
    } else {
      c.textAlign = "right"; c.fillText(n(run.peak_tokens), GUT - 6, Y(run.peak_tokens) + 8);
    }
    c.textAlign = "left";
  }
  function turnsOf(run) {
    // Hundreds of turns would be a grey wall: a line is drawn where it has room.
    let last = -1e9;
    const spaced = (t) => { const line = t.x0 * panelScale(run) - last >= 9; if (line) last = t.x0 * panelScale(run); return { ...t, line }; };
    if (state.axis === "seen") return D.turns.map((t) => ({ ...t, x0: t.start, x1: t.end })).map(spaced);
    const at = (seen) => { const i = run.timeline.events.findIndex((e) => e[0] > seen); return i < 0 ? span(run) : Math.max(0, i - 0.5); };
    return D.turns.map((t) => ({ ...t, x0: t.start === 0 ? 0 : at(t.start), x1: at(t.end) })).map(spaced);
  }
  function fit(c, text, width) {
    if (c.measureText(text).width <= width) return text;
    for (let k = text.length - 1; k >= 4; k--) { const cut = text.slice(0, k).trimEnd() + "…"; if (c.measureText(cut).width <= width) return cut; }
    return "";
  }

  function drawRows(p) {
    const c = size(p.rows, p.w, p.h), run = p.run, h = p.rowH, gap = h >= 5 ? 1 : h >= 3 ? .5 : 0;
    const ink = css("--ink"), line = css("--line"), panel = css("--panel");
    c.strokeStyle = line;
    for (const t of turnsOf(run)) if (t.line) { const x = Math.round(X(p, t.x0)) + .5; c.beginPath(); c.moveTo(x, 0); c.lineTo(x, p.h); c.stroke(); }
    c.font = "11px system-ui, sans-serif"; c.textAlign = "right"; c.textBaseline = "middle"; c.fillStyle = css("--faint");
    const every = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find((k) => k * h / STRIP >= 26) || 20000;
    for (let r = 0; r < numTokens; r += every) c.fillText(n(r), GUT - 12, Math.max(6, r * h / STRIP + 4));
    const top = (s) => s.start * h / STRIP, high = (s) => (s.end - s.start) * h / STRIP, inner = (s) => Math.max(s.pages > 1 ? .75 : 1, high(s) - gap);
    for (const s of run.strips) {
      const y = top(s), tall = inner(s), colour = colours[s.region], x0 = X(p, bornX(run, s)), x1 = Math.max(x0 + 1.5, X(p, endX(run, s)));
      c.fillStyle = colour; c.globalAlpha = 1; c.fillRect(GUT - 8, y, 4, tall);
      const whole = !run.tiered && s.last >= 0 && s.evicted.every((e) => e === s.last);
      if (run.tiered) outside(p, c, s, y, tall, x0, x1);
      let from = x0, alpha = 1, there = 0, lower = 0, i = 0;
      const paint = (to) => {
        if (to > from && there > 0) {
          c.globalAlpha = alpha;
          const full = tall * (there - lower) / s.pages, coded = tall * lower / s.pages;
          if (full > 0) c.fillRect(from, y, to - from, full);
          // What is at fewer bits is striped, all of it on the same lines.
          if (coded > 0) for (let x = Math.floor(from / 3) * 3; x < to; x += 3) { const l = Math.max(x, from), r = Math.min(x + 1.5, to); if (r > l) c.fillRect(l, y + full, r - l, coded); }
        }
        from = Math.max(from, to);
      };
      const at = (e) => Math.min(x1, Math.max(x0, X(p, xOf(run, e))));
      const scoresBefore = (e) => {
        for (; i < s.levels.length && s.levels[i] < e; i += 2) if (!s.pinned) { paint(at(s.levels[i])); alpha = shade(s.levels[i + 1], s.pages > 1 ? .4 : .22); }
      };
      // The tokens of a strip come one right after another: it starts with those of its first forward.
      for (const [e, change, down] of s.changes) {
        scoresBefore(e);
        if (change < 0 || there || (run.tiered && e !== s.changes[0][0])) paint(change < 0 && e === s.last && !run.tiered ? x1 : at(e));
        if (change < 0 && !whole) {
          c.globalAlpha = .75; c.fillStyle = ink;
          if (h >= 3) c.fillRect(from - .5, y + tall * (there + change) / s.pages, 1, tall * -change / s.pages);
          c.fillStyle = colour;
        }
        there += change; lower += down;
      }
      scoresBefore(Infinity);
      paint(x1);
      c.globalAlpha = 1;
      if (s.pinned && high(s) >= 3) { c.strokeStyle = ink; c.lineWidth = h >= 5 ? 1.2 : .6; c.strokeRect(x0 + .6, y + .5, x1 - x0 - 1.2, high(s) - gap - 1); }
      if (whole) { c.fillStyle = ink; c.fillRect(x1 - .75, y - (h >= 5 ? .5 : 0), h >= 4 ? 2 : 1, Math.max(1, high(s) - gap + (h >= 5 ? 1 : 0))); }
    }
    // What came back, and dots, come last, or the next row would cover half of each.
    if (run.tiered) for (const s of run.strips) {
      const tall = inner(s), reach = Math.min(6, Math.max(3, tall)), middle = top(s) + tall / 2;
      c.fillStyle = css("--good"); c.strokeStyle = panel; c.lineWidth = .8;
      let last = -1e9;
      for (const [e, change] of s.changes.slice(1)) {
        const x = X(p, xOf(run, e));
        if (change <= 0 || x - last < 3 || s.born.includes(e)) continue;
        last = x;
        if (h < 3.5) { c.fillRect(x - .75, top(s), 1.5, tall); continue; }
        c.beginPath(); c.moveTo(x - 1, middle - reach / 2 - .5); c.lineTo(x + reach - 1, middle); c.lineTo(x - 1, middle + reach / 2 + .5); c.closePath(); c.fill(); c.stroke();
      }
    }
    for (const s of run.strips) {
      if (s.pinned) continue;
      let last = -1e9;
      c.fillStyle = ink; c.strokeStyle = panel; c.lineWidth = .8;
      for (const e of s.refreshed) {
        const x = X(p, xOf(run, e));
        if (x - last < 7) continue;
        last = x;
        if (h < 3.5) { c.globalAlpha = .55; c.fillRect(x - .6, top(s), 1.2, inner(s)); c.globalAlpha = 1; continue; }
        c.beginPath(); c.arc(x, top(s) + inner(s) / 2, Math.min(2.3, h / 3), 0, 7); c.fill(); c.stroke();
      }
    }
    for (const [start, end] of pinnedRuns(run)) if (h * (end - start) >= 12 * STRIP) lock(c, 9, (start + end) / 2 * h / STRIP - 6, ink);
  }
  // A line through the middle of the row: whole where pages are in memory, dotted where on disk.
  function outside(p, c, s, y, tall, x0, x1) {
    let host = 0, disk = 0, from = x0;
    const middle = y + tall / 2, thick = tall >= 4 ? 1.4 : 1, run = p.run;
    const draw = (to) => {
      if (to <= from || host + disk <= 0) { from = Math.max(from, to); return; }
      c.globalAlpha = .3 + .7 * Math.max(host, disk) / s.pages;
      if (host >= disk) c.fillRect(from, middle - thick / 2, to - from, thick);
      else for (let x = Math.ceil(from / 5) * 5; x < to; x += 5) c.fillRect(x, middle - thick / 2, Math.min(2, to - x), thick);
      c.globalAlpha = 1;
      from = to;
    };
    for (const [e, , , inMemory, onDisk] of s.changes) {
      if (!inMemory && !onDisk) continue;
      draw(Math.min(x1, Math.max(x0, X(p, xOf(run, e)))));
      host += inMemory; disk += onDisk;
    }
    draw(x1);
  }
  // What is thin already must not be pale as well.
  const shade = (level, least) => least + (1 - least) * (level / 100);
  function pinnedRuns(run) {
    const out = [];
    for (const s of run.strips) if (s.pinned) {
      const last = out[out.length - 1];
      if (last && last[1] === s.start) last[1] = s.end; else out.push([s.start, s.end]);
    }
    return out;
  }
  function lock(c, x, y, ink) {
    c.fillStyle = ink; c.strokeStyle = ink; c.lineWidth = 1.5;
    c.fillRect(x, y + 5, 9, 7); c.beginPath(); c.arc(x + 4.5, y + 5, 3, Math.PI, 0); c.stroke();
  }

  // ---- cursor, tooltip, play
  function hover(panel, e) {
    const box = panel.rows.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    const v = Math.max(0, Math.min(span(panel.run), (x - GUT) / panel.sx));
    state.cursor = v / span(panel.run);
    cursor();
    show(panel, y * STRIP / panel.rowH, v, e.clientX, e.clientY);
  }
  function leave() { state.cursor = null; $("tip").hidden = true; cursor(); }
  function step(panel, e) {
    const dx = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (dx === undefined) return;
    e.preventDefault();
    const from = state.cursor === null ? (dx > 0 ? 0 : 1) : state.cursor;
    state.cursor = Math.max(0, Math.min(1, from + dx / 100));
    cursor();
  }
  function eventAt(run, v) {
    const ev = run.timeline.events;
    if (state.axis === "event") return Math.min(ev.length - 1, Math.round(v));
    let lo = 0, hi = ev.length - 1;
    while (lo < hi) { const mid = (lo + hi + 1) >> 1; if (ev[mid][0] <= v) lo = mid; else hi = mid - 1; }
    return lo;
  }
  function levelAt(page, e) {
    let level = null;
    for (let i = 0; i < page.levels.length && page.levels[i] <= e; i += 2) level = page.levels[i + 1];
    return level;
  }
  function cursor() {
    for (const p of panels) {
      const c = p.overC, run = p.run, ev = run.timeline.events;
      c.clearRect(0, 0, p.w, TOP + p.h);
      const t = state.cursor === null ? 1 : state.cursor, v = t * span(run), x = X(p, v), e = ev[eventAt(run, v)];
      if (state.cursor !== null) {
        if (state.playing) { c.fillStyle = css("--panel"); c.fillRect(x, 20, p.w - x, TOP + p.h); }
        c.fillStyle = css("--ink"); c.fillRect(x - .5, 20, 1, TOP + p.h);
      }
      p.now.textContent = e ? `${state.cursor === null ? "at the end: " : ""}${n(e[1])} of ${n(e[0])} tokens kept${D.clock === "steps" ? ` · step ${n(e[4])}` : ""}` : "";
    }
  }
  function words(s, run, e) {
    // The text of a strip, what is gone by event e struck out, what is outside pale.
    const node = el("q", {}), each = run.timeline.page_size;
    for (let at = 0; at < s.pages; at++) {
      const text = D.texts.slice(s.start + at * each, s.start + (at + 1) * each).join("");
      const tier = tierAt(s, at, e);
      if (text) node.append(tier <= FEWER ? text : el(tier === LOST ? "s" : "i", {}, text));
    }
    return node.textContent ? [node] : [];
  }
  function show(panel, token, v, cx, cy) {
    const run = panel.run, tip = $("tip");
    const s = run.strips.find((q) => q.start <= token && token < q.end);
    if (!s || bornX(run, s) > v) { tip.hidden = true; return; }
    const e = eventAt(run, v), tiers = s.evicted.map((_, at) => tierAt(s, at, e)), left = tiers.filter((t) => t <= FEWER).length, region = D.regions[s.region];
    const level = levelAt(s, e), ends = s.evicted.filter((g) => g >= 0), many = s.pages > 1;
    const line = (a, b) => el("div", { class: "row" }, el("span", {}, a), el("b", {}, b));
    const turn = D.turns.find((t) => s.start < t.end);
    const when = (g) => `token ${n(run.seenAt(g))}, event ${g}`;
    tip.replaceChildren(
      el("div", { class: "row" }, el("b", {}, run.timeline.page_size > 1 && !many ? `page ${s.page}` : many ? `tokens ${n(s.start)}–${n(s.end - 1)}` : `token ${n(s.start)}`),
        el("b", {}, el("span", { class: "swatch", style: `display:inline-block;opacity:1;background:${colours[s.region]}` }), " " + region)),
      ...(many ? [line("kept here", `${left} of ${s.pages}${run.timeline.page_size > 1 ? " pages" : ""}`)] : [line("tokens", n(s.tokens))]),
      line("born", `token ${n(s.start)}, event ${s.changes[0][0]}`),
      ...(s.moves && !s.pinned ? [line("now", [...new Set(tiers)].sort().map((t) => (many && new Set(tiers).size > 1 ? `${tiers.filter((q) => q === t).length} ` : "") + TIERS[t]).join(", ")), ...(s.back ? [line("came back", `${n(s.back)}×`)] : [])] : []),
      ...(s.pinned ? [line("evicted", "never: pinned")]
        : s.moves ? []
        : !ends.length ? [line("evicted", many ? "none" : "still here")]
        : !many ? [line("evicted", when(ends[0]))]
        : [line("first evicted", when(Math.min(...ends))), line("at the end", `${s.pages - ends.length} of ${s.pages} kept`)]),
      ...(s.pinned ? [] : [line("score here", !left ? (s.moves ? "–" : "gone") : level === null ? "not scored yet" : `${level}% of the highest`)]),
      ...(s.refreshed.length ? [line("refreshed", `${s.refreshed.length}×`)] : []),
      ...(turn ? [line("turn", `${turn.index + 1} · ${turn.label}`)] : []),
      ...words(s, run, e),
    );
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, cx + 16 + box.width > innerWidth ? cx - box.width - 14 : cx + 16) + "px";
    tip.style.top = Math.max(8, Math.min(innerHeight - box.height - 8, cy + 14)) + "px";
  }
  $("play").addEventListener("click", () => {
    if (state.playing) { state.playing = false; state.cursor = null; $("play").textContent = "▶ Play"; cursor(); return; }
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { state.cursor = 0; cursor(); return; }
    state.playing = true; $("play").textContent = "■ Stop";
    const start = performance.now(), length = 9000;
    const tick = (now) => {
      if (!state.playing) return;
      state.cursor = Math.min(1, (now - start) / length);
      if (state.cursor >= 1) { state.playing = false; state.cursor = null; $("play").textContent = "▶ Play"; }
      cursor();
      if (state.playing) requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  });

  // ---- answers
  const probes = D.runs.length ? D.runs[0].answers : [];
  if (probes.length) {
    $("answers").hidden = false;
    const head = el("tr", {}, el("th", { scope: "col" }, "Fact, and where it was planted"), ...D.runs.map((r) => el("th", { scope: "col" }, r.policy)));
    const body = el("tbody", {});
    probes.forEach((a, i) => {
      const cells = D.runs.map((r) => {
        const b = r.answers[i];
        return el("td", { "data-policy": r.policy }, el("span", { class: b.correct ? "mark ok" : "mark no", title: b.correct ? "right" : "wrong" }, b.correct ? "✓" : "✗"), said(b));
      });
      body.append(el("tr", {}, el("th", { scope: "row" }, a.question, el("div", { class: "gold" }, "expected: " + a.gold),
        el("div", { class: "where" }, el("span", { class: "swatch", style: `background:${colourOf(a.region)}` }), `${a.where} (${a.region})`)), ...cells));
    });
    $("answertable").append(el("thead", {}, head), body);
  }
  function said(b) {
    const node = el("span", { class: "said" }), at = b.correct && b.at ? b.at : null;
    if (!at) { node.append(b.answer || "(nothing)"); return node; }
    const chars = Array.from(b.answer);
    node.append(chars.slice(0, at[0]).join(""), el("mark", {}, chars.slice(at[0], at[1]).join("")), chars.slice(at[1]).join(""));
    return node;
  }

  // ---- kept by region
  {
    const names = D.regions.filter((r) => D.runs.some((run) => (run.seen[r] || 0) > 0));
    const most = Math.max(1, ...D.runs.flatMap((run) => names.map((r) => run.seen[r] || 0)));
    const head = el("tr", {}, el("th", { scope: "col" }, "Region"), ...D.runs.map((r) => el("th", { scope: "col" }, r.policy)));
    const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name), ...D.runs.map((run) => {
      const kept = run.kept[name] || 0, seen = run.seen[name] || 0, colour = colourOf(name);
      return el("td", {}, el("div", { class: "track" }, el("i", { style: `width:${100 * seen / most}%;background:${colour};opacity:.2` }), el("i", { style: `width:${100 * kept / most}%;background:${colour}` })),
        el("div", { class: "kept" }, `${n(kept)} of ${n(seen)}`));
    })));
    $("regiontable").append(el("thead", {}, head), el("tbody", {}, ...rows));
  }

  // ---- cost
  const costed = D.runs.filter((r) => r.cost && r.cost.turns.some((t) => t.delta_nll_per_token !== null));
  if (costed.length) {
    $("cost").hidden = false;
    const W = 1000, H = 230, L = 52, R = 96, B = 24, T = 12;
    const turns = costed[0].cost.turns, xs = (i) => L + (turns.length < 2 ? .5 : i / (turns.length - 1)) * (W - L - R);
    const values = costed.flatMap((r) => r.cost.turns.map((t) => t.delta_nll_per_token)).filter((v) => v !== null);
    const lo = Math.min(0, ...values), hi = Math.max(0.01, ...values), ys = (v) => T + (hi - v) / (hi - lo) * (H - T - B);
    const chart = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Change in negative log-likelihood per token, by turn and policy" });
    for (const v of [lo, (lo + hi) / 2, hi, 0]) {
      chart.append(svg("line", { x1: L, x2: W - R, y1: ys(v), y2: ys(v), stroke: v === 0 ? "currentColor" : "var(--line)", "stroke-width": v === 0 ? 1 : .8 }));
      if (v === 0 || Math.abs(ys(v) - ys(0)) > 12) chart.append(svg("text", { x: L - 8, y: ys(v) + 4, "text-anchor": "end" }, v === 0 ? "0" : signed(v, 2)));
    }
    turns.forEach((t, i) => { if (turns.length < 26 || i % Math.ceil(turns.length / 25) === 0) chart.append(svg("text", { x: xs(i), y: H - 4, "text-anchor": "middle" }, String(t.index + 1))); });
    chart.append(svg("text", { x: W - R + 12, y: H - 4 }, "turn"));
    const inks = ["var(--accent)", "#d3712f", "#4fa84a", "#9a63dd", "#12a5b0", "#c24a86", "#8f96a3"];
    const ends = [];
    costed.forEach((run, k) => {
      const pts = run.cost.turns.map((t, i) => [i, t]).filter(([, t]) => t.delta_nll_per_token !== null);
      chart.append(svg("polyline", { points: pts.map(([i, t]) => `${xs(i)},${ys(t.delta_nll_per_token)}`).join(" "), fill: "none", stroke: inks[k % inks.length], "stroke-width": run.main ? 2.4 : 1.6 }));
      for (const [i, t] of pts) chart.append(svg("circle", { cx: xs(i), cy: ys(t.delta_nll_per_token), r: run.main ? 3.4 : 2.6, fill: inks[k % inks.length] },
        svg("title", {}, `${run.policy}, turn ${t.index + 1}: ${signed(t.delta_nll_per_token)} NLL per token, ${(100 * t.top1_agreement).toFixed(1)}% same top token, ${t.scored_tokens} tokens`)));
      if (pts.length) ends.push([ys(pts[pts.length - 1][1].delta_nll_per_token) + 4, run.policy, inks[k % inks.length]]);
    });
    ends.sort((a, b) => a[0] - b[0]);
    ends.forEach((e, i) => { if (i) e[0] = Math.max(e[0], ends[i - 1][0] + 14); chart.append(svg("text", { x: W - R + 10, y: e[0], style: `fill:${e[2]};font-weight:600` }, e[1])); });
    $("costchart").append(chart);
    const head = el("tr", {}, el("th", {}, "turn"), el("th", {}, "scored"), ...costed.flatMap((r) => [el("th", {}, `${r.policy}: kept`), el("th", {}, "Δ NLL"), el("th", {}, "same top")]));
    const dash = "–";
    $("costtable").append(el("thead", {}, head), el("tbody", {}, ...turns.map((t, i) => el("tr", {}, el("th", { scope: "row" }, `${t.index + 1} · ${t.label}`), el("td", {}, n(t.scored_tokens)),
      ...costed.flatMap((r) => { const q = r.cost.turns[i]; return [el("td", {}, n(q.kept_total)), el("td", {}, q.delta_nll_per_token === null ? dash : signed(q.delta_nll_per_token)), el("td", {}, q.top1_agreement === null ? dash : (100 * q.top1_agreement).toFixed(1) + "%")]; })))));
  }

  // ---- theme and size
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const paintTheme = () => { $("theme").textContent = dark() ? "☀ light" : "☾ dark"; };
  $("theme").addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; paintTheme(); layout(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paintTheme(); layout(); });
  if (location.hash === "#dark" || location.hash === "#light") document.documentElement.dataset.theme = location.hash.slice(1);
  paintTheme();
  build();
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(layout); });
})();
