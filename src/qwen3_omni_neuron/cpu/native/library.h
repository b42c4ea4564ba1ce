/* The library's interface: the constants, structs and functions that Python uses.
 *
 * The C compiler and cffi (see sources.py) both read this file. cffi skips lines that begin with #, so
 * nothing here may depend on the preprocessor. No call keeps a pointer. */

#ifndef LIBRARY_H
#define LIBRARY_H

#include <stdint.h>

/* Digest of the library's C sources. */
extern const int64_t source_digest;

/* Return values of the functions below. */
enum { DONE = 0, NO_MEMORY = 1, NO_SUCH_ROW = 2, UNSUITED = 3 };

/* ---- weights ---- */

/* Outputs of a matrix that lie side by side: see Matrix. */
enum { PANEL = 32 };

/* Types of weights, and FLOAT16 of scales, widened to float32 on use. COMPACT: bfloat16 numbers in 12
 * bits. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, FLOAT16 = 4, COMPACT = 5 };

/* The compact form, see Matrix: */
enum { BLOCK_INPUTS = 256 }; /* inputs per block */
enum { EXCEPTIONS = 24 };    /* most exceptions per block */
enum { BLOCK_HEAD = 128 };   /* bytes of a block's head: PANEL + 4 * EXCEPTIONS */
enum { QUAD_BYTES = 192 };   /* bytes of four inputs of a panel: 3 * 2 * PANEL */
enum { EXPONENTS = 16 };     /* exponents encoded by 4 bits */

/* A matrix [out, into] in panels: [ceil(out / PANEL), into, PANEL], zeros after the last output. A
 * panel's products are sums side by side, each over `into` in order: a row's result is the same for
 * every processor and number of rows and threads.
 *
 * An INT4 panel has a block for each `group` inputs, the last padded with zeros. A block has
 *   uint32 [group / 8, PANEL]: the numbers of 8 inputs plus 8, the first in the lowest 4 bits;
 *   [PANEL] scales of scale_type, of either sign.
 * A weight is scale * number. Products of INT8 and INT4 are of integers: see take_inputs of product.h.
 *
 * A COMPACT panel has the heads of all its blocks, of BLOCK_INPUTS inputs or, the last one, fewer, and
 * then its quads, of four inputs each. All is little-endian. Place 16 h + 2 i + j of a row's 32 is
 * output 16 h + 8 j + i, for i up to 7.
 * A head has
 *   uint8 [PANEL]: the lowest exponent of the numbers in each place;
 *   uint32 [EXCEPTIONS]: the numbers with an exponent below the lowest or more than 15 above it, as
 *     (input of the block * PANEL + place) << 16 | bfloat16 bits, ascending, then UINT32_MAX if there are
 *     fewer. In their place a quad has their sign and mantissa with any exponent.
 * A quad has uint16 words [3, PANEL]. Step: a number's exponent less the lowest.
 *   bits            15     14 to 11                           10 to 7  6 to 0
 *   of each word    sign   -                                  step     mantissa: inputs 0, 1 and 2
 *   of the first    -      step of input 3                    -        -
 *   of the second   -      upper 4 bits of its mantissa       -        -
 *   of the third    -      lower 3 bits of it, then its sign  -        - */
typedef struct {
    const void *panels;
    const float *scale; /* [out], factor of each output; NULL: 1 */
    const float *bias;  /* [out], added to each output; NULL: none */
    int64_t into, out;
    int64_t type;
    int64_t group;      /* of INT4: inputs with one scale, a multiple of 32 */
    int64_t scale_type; /* of INT4: FLOAT32, BFLOAT16 or FLOAT16 */
} Matrix;

/* A table of rows [count, width], for lookups. */
typedef struct {
    const void *rows;
    int64_t count, width;
    int64_t type; /* FLOAT32 or BFLOAT16 */
} Table;

/* Pack `count` dense matrices [out, into] of numbers of 1, 2 or 4 bytes, with all threads of the pool.
 * widen: bfloat16 (bytes is 2) to float32. */
int pack_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into,
                  int64_t bytes, int widen);

/* Pack `count` dense bfloat16 matrices [out, into], with all threads of the pool, as COMPACT:
 * cpu.native.binding.pack_compact_in_c. Returns UNSUITED if a block has too many exceptions. into: a
 * multiple of 4. */
int pack_compact_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into);

/* Round `count` dense bfloat16 matrices [out, into] to INT4 panels with bfloat16 scales, with all
 * threads of the pool: cpu.packing.quantise_groups. */
int quantise_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into,
                      int64_t group);

/* y = w x + bias for rows [rows, into], x_stride floats apart. */
int multiply_rows(const Matrix *w, int64_t rows, const float *x, int64_t x_stride, float *y,
                  int64_t threads);

/* Let up to `threads` threads of this process work at once, callers included. A team starts the threads
 * that it needs; the pool never shrinks. */
void grow_pool(int64_t threads);

/* ---- thinker and talker ---- */

/* A decoder layer. Absent parts are NULL pointers and matrices without panels: qk_norm in code2wav;
 * router and shared_* of dense layers, shared_* of the thinker. */
typedef struct {
    const float *attention_norm;     /* [hidden] */
    Matrix qkv;                      /* [(heads + 2 kv_heads) * head_dim, hidden] */
    const float *qk_norm;            /* [heads + kv_heads, head_dim] */
    Matrix out;                      /* [hidden, heads * head_dim] */
    const float *ffn_norm;           /* [hidden] */
    Matrix gate_up;                  /* gate, then up, [ffn, hidden] each; of every expert */
    Matrix down;                     /* [hidden, ffn]; of every expert */
    Matrix router;                   /* [experts, hidden] */
    Matrix shared_gate_up;           /* gate, then up, [shared_ffn, hidden] each */
    Matrix shared_down;              /* [hidden, shared_ffn] */
    Matrix shared_gate;              /* [1, hidden] */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn;
    int64_t experts, chosen, shared_ffn; /* experts: 0 for dense layers */
    int64_t window;     /* code2wav's: positions that a row sees, including its own; sets `from` of Rows */
    int32_t normalized; /* the chosen experts' weights sum to 1 */
    float norm_eps;
    const Layer *layer; /* [layers] */
    const float *norm;  /* [hidden] */
} Decoder;

/* A KV cache. keys and values: [layers, slots, kv_heads, positions, head_dim]. */
typedef struct {
    float *keys, *values;
    int64_t slots, positions;
} KvCache;

/* Rows added to the hidden states after each of the first `layers` layers: rows [count] and their
 * features [layers, count, hidden]. */
typedef struct {
    int64_t layers, count;
    const int64_t *rows;
    const float *features;
} Deepstack;

typedef struct {
    Decoder decoder;
    KvCache kv;
    Matrix head;              /* [vocab, hidden] */
    const float *frequencies; /* [head_dim / 2] */
    const int64_t *axis;      /* [head_dim / 2]: 0 time, 1 height, 2 width: its position */
    int64_t threads;          /* that a call may use */
} Stepper;

/* Run a decode step. slots, lengths [rows]: each row's slot, and its number of filled positions.
 * positions [rows]: rope positions. A row's input is row ids[row] of the table plus, unless NULL, its
 * slot's row of added [slots, hidden]. Writes logits [rows, vocab] and, unless NULL, the slots'
 * post-norm rows of hidden [slots, hidden]. Several threads may call it for different slots. */
int decode_step(const Stepper *p, int64_t rows, const int64_t *slots, const int64_t *lengths,
                const float *positions, const Table *table, const int64_t *ids, const float *added,
                float *logits, float *hidden);

/* Run `rows` rows of a prompt that follow a slot's first `start` rows. positions [3, rows]. The first
 * `named` rows are the rows ids [named] of the table, the others x [rows - named, hidden]. deepstack:
 * its rows ascend. Writes, unless logits is NULL, the last row's logits [vocab] and post-norm hidden
 * [hidden], and unless NULL accepted [rows, hidden]: see run_layers. */
int prefill(const Stepper *p, int64_t slot, int64_t start, int64_t rows, const float *positions,
            const Table *table, const int64_t *ids, int64_t named, const float *x,
            const Deepstack *deepstack, int64_t accept_layer, float *accepted, float *logits,
            float *hidden);

/* ---- code predictor ---- */

typedef struct {
    Decoder decoder;
    int64_t steps;
    const float *cosine, *sine; /* [steps + 1, head_dim / 2] */
    Table code0_embedding;      /* [code0_vocab, hidden] */
    Table embedding;            /* [steps * vocab, hidden] */
    Matrix head;                /* [vocab, hidden], of every step */
    int64_t threads;            /* that a call may use */
} Predictor;

/* Predict a frame for each of several slots. rows [slots]: their rows in hidden and feedback [..,
 * hidden]. code0 [slots]; noise [slots, steps, vocab], top_p and top_k [slots], all NULL for greedy;
 * top_k 0: all codes. Writes codes [slots, steps + 1], the rows of feedback and, unless
 * NULL, logits [steps, slots, vocab]. Keeps no state between calls: several threads may call it. */
int predict_frame(const Predictor *p, int64_t slots, const int64_t *rows, const float *hidden,
                  const int64_t *code0, const float *noise, const float *top_p,
                  const int64_t *top_k, int64_t *codes, float *feedback, float *logits);

/* ---- draws of text tokens and of code 0 ---- */

enum { GREEDY = -1 };

/* Sampling of one sequence: a Sampler of engines.sampling. */
typedef struct {
    const int64_t *allowed; /* [count] ids, ascending; NULL: the whole vocabulary */
    float *penalties;       /* [count], 1 where the sequence lacks the id; NULL: none */
    int32_t *counts;        /* [count], how often the id was drawn; NULL if not needed */
    int64_t count, top_k;   /* top_k: 0: all, or GREEDY */
    float temperature, top_p, min_p;
    float frequency, presence; /* subtracted from an id's score per occurrence, and once */
} Sampling;

/* Find the candidates of each sequence's next id: engines.sampling.Remaining. logits: [vocab] of each.
 * masks: NULL, or for each sequence NULL or a bit per allowed id: [vocab / 32] rounded up. Writes
 * counts [rows], 0 if an allowed logit is NaN or infinity, and indices and scores of all rows,
 * concatenated: space for rows * vocab. */
int remaining_rows(int64_t rows, const float *const *logits, int64_t vocab,
                   const Sampling *const *sampling, const uint32_t *const *masks, int64_t *counts,
                   int64_t *indices, float *scores);

/* ---- code2wav ---- */

/* Most floats of a vector. Rows of code2wav's blocks are multiples of it, or powers of two below it. */
enum { WIDEST = 16 };
/* Residual units of a block. */
enum { UNITS = 3 };

typedef struct {
    const float *frequency, *inverse_magnitude; /* [width], or of a line: see wave.c */
} Snake;

/* A residual unit: see wave.c. */
typedef struct {
    int64_t dilation;
    Snake first, second;
    Matrix conv;  /* 8 of [channels, channels], one per point; of lines [WIDEST, rows * channels] */
    Matrix point; /* [channels, channels]; of lines [WIDEST, WIDEST] */
} Unit;

/* A decoder block. */
typedef struct {
    int64_t into, out, rate; /* into, out: floats of a row, which are zeros after the last channel */
    Snake act;
    Matrix up; /* [rate * out, 2 taps * into]: of the input before, of the input; without panels in the
                  first block, whose upsampling is code2wav.c's */
    Unit units[UNITS];
} Block;

/* The decoder blocks after the first upsampling: see wave.h. */
typedef struct {
    int64_t blocks;
    const Block *block; /* [blocks] */
    Snake act;
    Matrix conv; /* [7 taps, channels]; its bias is the last tap's */
} Wave;

/* Transposed convolution and ConvNeXt block (model.code2wav.Upsample). */
typedef struct {
    int64_t ratio;
    Matrix up;                              /* `ratio` of [hidden, hidden], one per phase */
    const float *depthwise, *depthwise_bias; /* [7 taps, hidden], [hidden] */
    const float *norm, *norm_bias;          /* [hidden] */
    float norm_eps;
    Matrix fc1, fc2; /* [wide, hidden], [hidden, wide] */
} Stage;

typedef struct {
    Decoder decoder; /* its `out` and `down` have the layers' scales; `window` is set */
    Table embedding; /* [groups * codes, hidden] */
    int64_t groups, codes;
    const float *frequencies; /* [head_dim / 2] */
    int64_t stages;
    const Stage *stage; /* [stages] */
    Matrix conv_in;     /* [channels, 7 taps * hidden] */
    Matrix up;          /* of the first block: [rate * out, 2 taps * channels] */
    Wave wave;
    int64_t threads; /* that a call may use */
} Code2Wav;

/* Floats of a stream's state: keys, values, the last rows needed by each stage's depthwise convolution,
 * by conv_in and by the first block's upsampling, and the wave's. */
int64_t code2wav_state_size(const Code2Wav *c);

/* Decode the next frames of streams. codes [streams, groups, frames]. positions [streams]: earlier
 * frames; state [streams, code2wav_state_size]: from the last call; both NULL at the start of streams.
 * Writes new_state and samples [streams, ...]. Several threads may call it. */
int run_code2wav(const Code2Wav *c, int64_t streams, const int64_t *codes, int64_t frames,
                 const int64_t *positions, const float *state, float *new_state, float *samples);

/* ---- audio encoder ---- */

/* Convolutions of the audio encoder. */
enum { CONVOLUTIONS = 3 };

typedef struct {
    int64_t mels, times;       /* of a chunk */
    Matrix conv[CONVOLUTIONS]; /* [channels, 3 taps of mels * 3 of times * input channels] */
    int64_t threads;           /* that a call may use */
} AudioConvolutions;

/* x: [chunks, mels, times], zero from time `filled` on. y: [chunks, times / 8 rounded up, channels *
 * mels / 8], zero from filled / 8 rounded up on. */
int convolve_audio(const AudioConvolutions *a, int64_t chunks, int64_t filled, const float *x,
                   float *y);

/* ---- layers of the audio and the vision encoder ---- */

typedef struct {
    int64_t hidden, heads, head_dim;
    float norm_eps;
    int32_t tanh_gelu; /* the activation is gelu's tanh approximation */
    const float *attention_norm, *attention_bias; /* [hidden] */
    const float *ffn_norm, *ffn_bias;             /* [hidden] */
    Matrix qkv, out; /* [3 * hidden, hidden], [hidden, hidden] */
    Matrix fc1, fc2; /* [ffn, hidden], [hidden, ffn] */
    int64_t threads; /* that a call may use */
} EncoderLayer;

/* Apply a layer to x [frames, rows, hidden], in place. A row attends to the first seen[frame] rows of
 * its frame, at least one. cosine and sine [rows, head_dim / 2]: every frame's rotary embedding; both
 * NULL: none. */
int encoder_layer(const EncoderLayer *l, int64_t frames, int64_t rows, const int64_t *seen,
                  const float *cosine, const float *sine, float *x);

#endif
