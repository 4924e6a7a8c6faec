// ---------- colour ----------

let palette = new Uint32Array(256);
let paletteCss = [];
let paletteDark = [];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const hex = D.scale[theme];
  for (let i = 0; i < 256; i++) {
    const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.substr(6 * i + at, 2), 16));
    palette[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    paletteCss[i] = `rgb(${r} ${g} ${b})`;
    paletteDark[i] = 0.299 * r + 0.587 * g + 0.114 * b < 140;
  }
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
}

// A weight's place in the palette: its root, so that small weights are seen.
const shade = (weight) => Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, weight))));

// What is forbidden is hatched.
function hatch(context, x, y, width, height, step = 6) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = style("--forbidden");
  context.fillRect(x, y, width, height);
  context.strokeStyle = style("--hatch");
  context.lineWidth = 1.2;
  context.beginPath();
  for (let d = -height; d < width; d += step) {
    context.moveTo(x + d, y + height);
    context.lineTo(x + d + height, y);
  }
  context.stroke();
  context.restore();
}

// An n x n picture of a matrix, forbidden cells transparent. Cells are pooled by their maximum, so that no thin stripe
// gets lost.
function picture(matrix, n, forbidden, index, most = Infinity) {
  const pool = Math.max(1, Math.ceil(n / most));
  const size = Math.ceil(n / pool);
  const image = new ImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  for (let y = 0; y < size; y++) {
    for (let x = 0; x < size; x++) {
      let value = -Infinity;
      let open = false;
      for (let t = y * pool; t < Math.min(n, (y + 1) * pool); t++) {
        for (let s = x * pool; s < Math.min(n, (x + 1) * pool); s++) {
          if (!forbidden(t, s)) {
            open = true;
            if (matrix[t * n + s] > value) value = matrix[t * n + s];
          }
        }
      }
      if (open) pixels[y * size + x] = palette[index(value)];
    }
  }
  const canvas = make("canvas", {width: size, height: size});
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function thumbnail(canvas, matrix, n, forbidden) {
  const side = 2 * 96;
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  hatch(context, 0, 0, side, side, 9);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture(matrix, n, forbidden, shade, 96), 0, 0, side, side);
}

const TICKS = [[0, "0"], [0.01, "1"], [0.1, "10"], [0.3, "30"], [1, "100 %"]];
function legends() {
  for (const legend of document.querySelectorAll("[data-legend]"))
    ramp(legend, TICKS, Math.sqrt);
}

function ramp(legend, ticks, place) {
  const strip = make("canvas", {width: 256, height: 1});
  const context = strip.getContext("2d");
  for (let i = 0; i < 256; i++) {
    context.fillStyle = paletteCss[i];
    context.fillRect(i, 0, 1, 1);
  }
  const labels = ticks.map(([value, text]) => {
    const mark = make("span", {}, text);
    mark.style.left = `${100 * place(value)}%`;
    return mark;
  });
  const forbidden = make(
    "span",
    {},
    make("i", {class: "hatched"}),
    causal() ? "forbidden: a token can’t look ahead" : "forbidden",
  );
  legend.replaceChildren(make("div", {class: "ramp"}, strip, ...labels), forbidden);
}
