// A large map: canvas, token labels on both axes, scrolling, zoom, pointer and keyboard.

class MapView {
  constructor(root, name, {onmove, onkeep, strip = false}) {
    Object.assign(this, {root, name, onmove, onkeep, strip, zoom: 1, query: null, key: null});
    root.className = "map";
    root.tabIndex = 0;
    root.setAttribute("role", "application");
    root.setAttribute(
      "aria-label",
      `${name}: arrow up and down choose the token that looks, left and right the token looked at`,
    );
    this.canvas = make("canvas");
    this.room = make("div");
    this.room.append(this.canvas);
    root.append(this.room);
    root.addEventListener("scroll", () => {
      this.draw();
      this.twin?.follow(this);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.point(event, onmove);
    });
    this.canvas.addEventListener("click", (event) => this.point(event, onkeep ?? onmove));
    root.addEventListener("keydown", (event) => this.pressed(event));
    new ResizeObserver(() => {
      if (root.clientWidth && root.clientWidth !== this.lastWidth) {
        this.lastWidth = root.clientWidth;
        this.layout();
      }
    }).observe(root);
  }
  set(matrix, n, labels, forbidden, index) {
    Object.assign(this, {matrix, n, labels, forbidden, index});
    this.query = this.query === null ? null : Math.min(this.query, n - 1);
    this.key = this.key === null ? null : Math.min(this.key, n - 1);
    this.image = picture(matrix, n, forbidden, index);
    const longest = Math.max(...labels.map((label) => [...label].length));
    this.longest = Math.round(Math.min(96, Math.max(34, 9 * longest + 10)));
    this.rotated = longest > 1;
    this.layout();
  }
  layout() {
    if (!this.matrix || !this.root.clientWidth) return;
    this.right = this.strip ? 54 : 6;
    const width = this.root.clientWidth;
    // Where cells are too small for labels, one is shown at a time, and less room is kept for it.
    const labelled = !this.rotated || (width - this.longest - this.right) / this.n >= 7.2;
    const narrow = labelled ? this.longest : Math.min(66, this.longest);
    const fit = (width - narrow - this.right) / this.n;
    this.gutter = this.zoom > 1 ? this.longest : narrow;
    this.top = this.rotated ? this.gutter : 38;
    const tallest = Math.max(260, window.innerHeight * 0.74);
    this.cell = Math.min(34, fit) * this.zoom;
    const inner = this.cell * this.n;
    const height = Math.min(this.top + inner + 6, Math.max(width * 1.02, 240), this.zoom > 1 ? tallest : 1e9);
    this.width = width;
    this.height = height;
    this.room.style.width = `${Math.max(width, this.gutter + inner + this.right)}px`;
    this.room.style.height = `${Math.max(height, this.top + inner + 6)}px`;
    this.root.style.height = `${height + 2}px`;
    this.draw();
  }
  follow(other) {
    if (Math.abs(this.root.scrollTop - other.root.scrollTop) > 1) this.root.scrollTop = other.root.scrollTop;
    if (Math.abs(this.root.scrollLeft - other.root.scrollLeft) > 1) this.root.scrollLeft = other.root.scrollLeft;
  }
  // scroll so that the chosen cell is in view
  reveal() {
    const keep = (position, cell, span, gutter) => {
      const at = this.cell * cell;
      const room = span - gutter - this.cell;
      return at < position ? at : at > position + room ? at - room : position;
    };
    this.root.scrollTop = keep(this.root.scrollTop, this.query, this.height, this.top + 6);
    if (this.key !== null)
      this.root.scrollLeft = keep(this.root.scrollLeft, this.key, this.width, this.gutter + this.right);
  }
  mark(query, key, reveal = false) {
    this.query = query;
    this.key = key;
    if (reveal) this.reveal();
    this.draw();
  }
  point(event, tell) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - this.gutter + this.root.scrollLeft;
    const y = event.clientY - box.top - this.top + this.root.scrollTop;
    const query = Math.floor(y / this.cell);
    const key = Math.floor(x / this.cell);
    if (query < 0 || query >= this.n) return;
    tell(query, key >= 0 && key < this.n && event.clientX - box.left < this.width - this.right ? key : null, false);
  }
  pressed(event) {
    let query = this.query ?? this.n - 1;
    let key = this.key;
    if (event.key === "ArrowUp") query--;
    else if (event.key === "ArrowDown") query++;
    else if (event.key === "ArrowLeft") key = (key ?? query) - 1;
    else if (event.key === "ArrowRight") key = (key ?? query) + 1;
    else if (event.key === "Home") query = 0;
    else if (event.key === "End") query = this.n - 1;
    else return;
    event.preventDefault();
    const clamp = (x) => Math.min(this.n - 1, Math.max(0, x));
    this.onmove(clamp(query), key === null ? null : clamp(key), true);
  }
  draw() {
    if (!this.matrix || !this.width) return;
    const dpr = window.devicePixelRatio || 1;
    const {canvas, width, height, gutter, top, cell, n} = this;
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    const left = this.root.scrollLeft;
    const above = this.root.scrollTop;
    context.scale(dpr, dpr);
    const mapWidth = Math.min(cell * n - left, width - gutter - this.right);
    const mapHeight = Math.min(cell * n - above, height - top - 4);
    context.save();
    context.beginPath();
    context.rect(gutter, top, mapWidth, mapHeight);
    context.clip();
    hatch(context, gutter, top, mapWidth, mapHeight, 7);
    context.imageSmoothingEnabled = cell < 1 / dpr;
    context.drawImage(
      this.image,
      left / cell,
      above / cell,
      mapWidth / cell,
      mapHeight / cell,
      gutter,
      top,
      mapWidth,
      mapHeight,
    );
    const line = (x, y, w, h) =>
      context.strokeRect(gutter - left + x * cell, top - above + y * cell, w * cell, h * cell);
    context.strokeStyle = style("--accent");
    context.lineWidth = cell > 6 ? 2 : 1.2;
    if (this.query !== null) line(0, this.query, n, 1);
    if (this.key !== null) line(this.key, 0, 1, n);
    context.restore();
    context.textBaseline = "middle";
    const family = style("--mono");
    const steps = this.rotated ? 1 : Math.min(3, Math.ceil(9 / cell));  // narrow labels stand in up to 3 lanes
    const size = Math.min(14, Math.max(8.5, cell * 0.86));
    const [first, last] = [Math.floor(above / cell), Math.min(n, Math.ceil((above + height - top) / cell))];
    const [start, end] = [Math.floor(left / cell), Math.min(n, Math.ceil((left + width - gutter) / cell))];
    const every = cell * steps >= 7.2 ? 1 : [10, 20, 50, 100, 200].find((step) => step * cell >= 30);
    const name = (i) => (every === 1 ? this.labels[i] : String(i));
    const write = (text, x, y, turned, box) => {
      context.save();
      context.translate(x, y);
      if (turned) context.rotate(-Math.PI / 2);
      if (box) {
        const w = context.measureText(text).width;
        const from = context.textAlign === "right" ? -w : context.textAlign === "center" ? -w / 2 : 0;
        context.fillStyle = style("--accent-soft");
        context.fillRect(from - 3, -9, w + 6, 18);
      }
      context.fillStyle = style(box ? "--ink" : "--quiet");
      context.fillText(text, 0, 0);
      context.restore();
    };
    const cut = (text) => {
      const all = [...text];
      const most = Math.floor((gutter - 10) / 8.4);
      return all.length > most ? all.slice(0, most - 1).join("") + "…" : text;
    };
    const row = (i, box) => {
      const y = top - above + (i + 0.5) * cell;
      context.textAlign = "right";
      if (y > top - 2 && y < height)
        write(
          cut(box ? this.labels[i] : name(i)),
          gutter - 5 - (box || every > 1 ? 0 : (i % steps) * 9),
          y,
          false,
          box,
        );
    };
    const column = (i, box) => {
      const x = gutter - left + (i + 0.5) * cell;
      const turned = this.rotated && (box || every === 1);
      context.textAlign = turned ? "left" : "center";
      if (x > gutter - 2 && x < width - this.right + 4)
        write(
          cut(box ? this.labels[i] : name(i)),
          x,
          turned ? top - 5 : top - 10 - (box || every > 1 ? 0 : (i % steps) * 10),
          turned,
          box,
        );
    };
    context.font = `${every === 1 ? size : 10.5}px ${family}`;
    for (let i = Math.ceil(first / every) * every; i < last; i += every) row(i);
    for (let i = Math.ceil(start / every) * every; i < end; i += every) column(i);
    context.font = `600 ${Math.max(12, size)}px ${family}`;
    if (this.query !== null) row(this.query, true);
    if (this.key !== null) column(this.key, true);
    if (this.strip) {
      // entropy of each row, as a bar
      const x = width - this.right + 8;
      const room = this.right - 14;
      const full = Math.log2(Math.max(2, n));
      for (let t = first; t < last; t++) {
        const y = top - above + t * cell;
        if (y < top - cell / 2) continue;
        context.fillStyle = style(t === this.query ? "--accent" : "--s0");
        context.fillRect(
          x,
          y + cell * 0.1,
          Math.max(0.5, (room * this.entropies[t]) / full),
          Math.max(0.8, cell * 0.8),
        );
      }
      context.fillStyle = style("--quiet");
      context.font = "10.5px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText("entropy", x, top - 10);
    }
  }
}
