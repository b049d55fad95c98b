/* C interface of libflashmoe: the routed experts of one mixture-of-experts layer on Hopper GPUs.
 *
 * No call throws, exits, prints or allocates device memory. Every call returns 0, or an error code
 * with a sentence in flashmoe_last_error() (thread-local). All launches go to the given stream and
 * are asynchronous. Calls marked "collective" must be made by every rank of the expert-parallel
 * group, in the same order, also with zero tokens. A backward is every rank's or none's: ranks tell
 * in their forwards that they have none, and it then ends where it is launched all the same, with
 * NaN and FLASHMOE_UNMATCHED, takes no epoch, and the group's next forward fails on every rank.
 *
 * One forward is: flashmoe_plan, flashmoe_await_plan, flashmoe_forward; or flashmoe_forward alone,
 * which then plans. One backward of it is flashmoe_backward, with flashmoe_gather before it if the
 * received rows were not kept and it neither reads nor copies tokens (FlashMoETokens). Each plan,
 * each backward and each flashmoe_settle takes the next epoch, a gather the next two.
 *
 * Structs and versions. A struct that a caller fills in begins with struct_size, which the caller
 * sets to sizeof(the struct) of the header that it was compiled with. The library refuses any other
 * size than its own: there is no compatibility between versions, and a change of a struct, an
 * enumeration or a function raises FLASHMOE_ABI_VERSION. A binding in another language compares its
 * mirrors with flashmoe_abi_version() and flashmoe_sizeof() when it loads the library.
 */
#ifndef FLASHMOE_INCLUDE_FLASHMOE_H_
#define FLASHMOE_INCLUDE_FLASHMOE_H_

#include <stdint.h>

#define FLASHMOE_ABI_VERSION 28
#define FLASHMOE_MAX_RANKS 8
#define FLASHMOE_MAX_TOPK 16
#define FLASHMOE_MAX_LOCAL_EXPERTS 512
#define FLASHMOE_MAX_SPARE_SLOTS 64
#define FLASHMOE_NUM_SPANS 12
#define FLASHMOE_NUM_RECORDS 256
#define FLASHMOE_REASON_BYTES 480
#define FLASHMOE_PLAN_HEADER_BYTES 16 /* FlashMoEInput.first_plan points to as many */

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHMOE_EXPORT __attribute__((visibility("default")))

/* ---- Versions and errors --------------------------------------------------------------------- */

typedef enum {
    FLASHMOE_OK = 0,
    FLASHMOE_BAD_ARGUMENT = 1,
    FLASHMOE_CUDA_ERROR = 2,
    FLASHMOE_PEER_TIMEOUT = 3,
    FLASHMOE_BAD_ROUTING = 4,
    FLASHMOE_TOO_MANY_ROWS = 5,
    FLASHMOE_REFUSED = 6,
    FLASHMOE_UNMATCHED = 7,
} FlashMoEStatus;

FLASHMOE_EXPORT int flashmoe_abi_version(void);

/* The sentence that belongs to this thread's last error. */
FLASHMOE_EXPORT const char* flashmoe_last_error(void);

/* sizeof of the struct of that name, 0 if the name is unknown. */
FLASHMOE_EXPORT uint64_t flashmoe_sizeof(const char* struct_name);

/* ---- A layer, and the memory that it needs --------------------------------------------------- */

typedef enum {
    FLASHMOE_SILU = 0,
    FLASHMOE_GELU = 1,
    FLASHMOE_GELU_TANH = 2,
    FLASHMOE_RELU = 3,
    FLASHMOE_SQUARED_RELU = 4,
    FLASHMOE_QUICK_GELU = 5, /* z sigmoid(1.702 z) */
} FlashMoEActivation;

typedef enum { FLASHMOE_FLOAT32 = 0, FLASHMOE_BFLOAT16 = 1, FLASHMOE_FLOAT16 = 2 } FlashMoEDtype;

/* Operands of experts' products. */
typedef enum {
    FLASHMOE_AS_GIVEN = 0, /* tokens and weights of the problem's dtype */
    FLASHMOE_FP8 = 1, /* blockwise E4M3 in a forward, whose launch quantizes tokens, weights and
                         fc2's input, all bfloat16; and in a backward what these then stand for */
    FLASHMOE_FP8_DGRAD = 2, /* the same, but a backward has weights, and gradients of outputs and of
                               fc1's outputs, in blockwise E4M3 for gradients of tokens; those of
                               weights have the former's stand for, and the latter as they are */
} FlashMoEExperts;

/* The purpose of replicas. */
typedef enum {
    FLASHMOE_BALANCE = 0, /* even loads of ranks */
    FLASHMOE_POPULAR = 1, /* rows that stay on their token's rank */
} FlashMoEReplicaPolicy;

/* A layer: what is computed. It is the same on every rank but for `rank`. */
typedef struct {
    uint32_t struct_size; /* sizeof(FlashMoEProblem) */
    int32_t rank;
    int32_t num_ranks;
    int32_t hidden;          /* H, a multiple of 64 */
    int32_t intermediate;    /* F, a multiple of 64 */
    int32_t num_experts;     /* of all ranks, a multiple of num_ranks */
    int32_t topk;            /* most experts of one token */
    int32_t max_tokens;      /* most tokens of one rank; 1024 for each CTA */
    int32_t dtype;           /* of tokens and weights: FLASHMOE_BFLOAT16 or FLASHMOE_FLOAT16 */
    int32_t activation;      /* FlashMoEActivation */
    int32_t is_gated;        /* fc1 is [2F, H], and the FFN computes act(gate) * up */
    int32_t glu_interleave;  /* rows of fc1's blocks, gate and up in turn: 1, or a power of two from
                                8 on, that divides F; 0: all gate rows first. Biases, gradients and
                                pre-activations have fc1's order */
    int32_t is_transposed;   /* weights are [in, out]: fc1 [H, 2F or F], fc2 [F, H] */
    int32_t is_split;        /* gate and up rows of fc1 are matrices of their own, [F, H] each; with
                                glu_interleave 0, not transposed. Biases stay one */
    int32_t skip_zero_probs; /* a selected expert of probability 0 gets no row */
    int32_t num_ctas;        /* grid of every launch; must fit the GPU at one CTA per SM */
    int32_t heap_tokens; /* most tokens of any layer that shares the heap; at least max_tokens */
    int32_t heap_topk;   /* most experts of one token of any such layer; at least topk */
    /* A slot is a place of a rank that computes an expert: one for each expert that it owns,
     * followed by spare ones for replicas of other ranks' experts. Every forward plans which
     * experts they hold, and owners send the weights. */
    int32_t spare_slots; /* spare ones of each rank, at most as many as it owns experts */
    int32_t
        heap_experts; /* most experts of any layer with spare slots that shares the heap, or 0 */
    /* Gated SiLU and quick GELU are act(min(gate, clamp)) * (up clamped on both sides + offset). */
    float clamp_value;      /* above 0; 0: no clamp */
    float linear_offset;    /* 0: none */
    int32_t replica_policy; /* FlashMoEReplicaPolicy; read with spare slots */
    int32_t experts;        /* FlashMoEExperts */
    int32_t rank_invariant; /* no bit of any result depends on the number of ranks, 1, 2, 4 or 8,
                               that a batch is divided over in its order: experts are a multiple of
                               8, not in FP8, and there are no spare slots in the heap */
    uint64_t timeout_ns;
    int64_t heap_slot_elements; /* most elements of weights and biases that all spare slots of a
                                   rank hold, of any such layer; or 0 */
} FlashMoEProblem;

/* How a pass can do without received rows, by means of x. */
typedef enum {
    FLASHMOE_READS_NO_TOKENS = 0,
    FLASHMOE_READS_TOKENS = 1,  /* without a buffer for rows its products read x where it is */
    FLASHMOE_COPIES_TOKENS = 2, /* a backward that copies x to a buffer for rows, which is free
                                   after the launch */
} FlashMoETokens;

/* Sizes in bytes unless named otherwise. */
typedef struct {
    uint32_t struct_size;
    uint32_t max_row_blocks;   /* worst case, blocks of 128 rows */
    uint64_t heap_bytes;       /* symmetric, on every rank; zero-initialized once */
    uint64_t workspace_bytes;  /* local, one per group; zero-initialized once */
    uint64_t plan_bytes;       /* local, one per forward, kept for its backward */
    uint64_t mailbox_bytes;    /* pinned host memory, one per group */
    uint64_t weight_map_bytes; /* host, then device: TMA descriptors of all local weights */
    uint64_t grad_table_bytes; /* host, then device: where all gradients of weights go */
    /* For each block of 128 rows: */
    uint64_t row_block_bytes;        /* received rows */
    uint64_t preact_block_bytes;     /* pre-activations */
    uint64_t scratch_block_bytes[2]; /* of a forward, and of a backward */
    uint64_t weight_copy_bytes[2];   /* device, in FP8: copies of a layer's weights, for a forward,
                                        and for a backward */
    uint32_t reads_tokens[2];        /* FlashMoETokens of a forward, and of a backward */
} FlashMoESizes;

/* Memory of one expert-parallel group, shared by all its layers. */
typedef struct {
    uint32_t struct_size;
    uint32_t counters;               /* whether launches count time and rows, and leave records */
    void* heaps[FLASHMOE_MAX_RANKS]; /* every rank's symmetric heap, mapped here */
    void* workspace;
    void* mailbox; /* pinned host memory, readable by the device at the same address */
    void* stream;
    void* trace; /* device memory for time stamps, or null; read by a library built to trace */
    double link_bytes_per_s; /* what comes from other ranks, or 0 where it is as fast as NVLink: the
                                slower, the more of its own rows a forward computes first */
    int32_t least_replica_rows; /* under the policy of even loads a replica takes at least so many
                                   rows of its expert, or is not worth its push; all ranks alike */
} FlashMoEGroup;

/* Says how much memory a problem needs. */
FLASHMOE_EXPORT int flashmoe_sizes(const FlashMoEProblem* problem, FlashMoESizes* sizes);

/* Loads every kernel that the problem can launch. CUDA loads kernels lazily, and may wait for the
 * GPU to be idle to do so: a first launch would hang while a kernel runs that waits for this very
 * rank.
 */
FLASHMOE_EXPORT int flashmoe_preload(const FlashMoEProblem* problem);

/* Where a spare slot lies in a rank's heap: weights of the problem's dtype and layout, and their
 * gradients in float32. */
typedef struct {
    uint32_t struct_size;
    void* fc1;
    void* fc1_up; /* where fc1 is split */
    void* fc2;
    void* fc1_bias;
    void* fc2_bias;
    void* fc1_grad;
    void* fc1_up_grad;
    void* fc2_grad;
    void* fc1_bias_grad;
    void* fc2_bias_grad;
} FlashMoESlot;

FLASHMOE_EXPORT int flashmoe_slot(const FlashMoEProblem* problem,
                                  void* heap,
                                  int32_t spare_slot,
                                  FlashMoESlot* slot);

/* Encodes the TMA descriptors of the weights in all local slots into host memory; spare slots
 * follow the local experts.
 *   fc1[e] [fc1_rows, hidden], fc2[e] [hidden, intermediate], or their transposes; of the
 *   problem's dtype, 16-byte aligned. Split: fc1 has all experts' gate matrices, then all up's
 *   weight_copies  in FP8 on the device, 256-byte aligned: weight_copy_bytes of the passes with
 *                  these maps, the larger for both. Every pass fills it from the weights, so that
 *                  layers whose passes follow one another share it, unless a launch says that it
 *                  is current; else NULL */
FLASHMOE_EXPORT int flashmoe_encode_weights(const FlashMoEProblem* problem,
                                            const void* const* fc1,
                                            const void* const* fc2,
                                            void* weight_copies,
                                            void* weight_maps);

/* Writes the table of where a backward's gradients go into host memory.
 *   grads        gradients of the weights in all local slots, all of fc1, then all of fc2: in the
 *                order and laid out as the weights are, and 16-byte aligned. NULL for a weight of
 *                a local expert: none is computed; split, for both its gate and its up rows
 *   bias_grads   the same for their biases; or NULL where the experts have none
 *   grads_dtype  the dtype of those of the local experts: float32 or the problem's; those in spare
 *                slots are float32 */
FLASHMOE_EXPORT int flashmoe_encode_grads(const FlashMoEProblem* problem,
                                          void* const* grads,
                                          void* const* bias_grads,
                                          int32_t grads_dtype,
                                          void* grad_table);

/* ---- Forward and backward -------------------------------------------------------------------- */

/* How a fused router makes probabilities of logits: softmax over a token's chosen experts, or over
 * all experts, or sigmoids, which are divided by their sum where several are chosen. */
typedef enum {
    FLASHMOE_SOFTMAX_OF_CHOSEN = 0,
    FLASHMOE_SOFTMAX = 1,
    FLASHMOE_SIGMOID = 2,
} FlashMoEScore;

/* A rank's inputs of a forward. Its routing is a map or, with index_bytes, indices, whose order
 * changes nothing. With a router probs and routing_map are written, by the launch that plans: every
 * token chooses its topk experts. */
typedef struct {
    uint32_t struct_size;
    int32_t num_tokens;
    int32_t probs_dtype;  /* FlashMoEDtype; with a router FLASHMOE_FLOAT32 */
    int32_t score;        /* FlashMoEScore, of the router */
    int32_t index_bytes;  /* of each index: 4 or 8; 0: routing_map is read, or the router runs */
    int32_t num_choices;  /* indices of each token, at most topk */
    int32_t is_settled;   /* the group's last launch was flashmoe_settle for this forward, on all
                             ranks or on none: its replicas are used; 0: the plan chooses some */
    const void* x;        /* [num_tokens, hidden] of the problem's dtype */
    void* probs;          /* [num_tokens, num_experts] of probs_dtype; with indices
                             [num_tokens, num_choices] */
    void* routing_map;    /* [num_tokens, num_experts] bytes, 0 or 1; unused with indices */
    const void* topk_idx; /* [num_tokens, num_choices] experts, distinct for a token; -1: none */
    const void* router_weight; /* [num_experts, hidden] of the problem's dtype; NULL: no router */
    void* logits;              /* [num_tokens, num_experts] float32, written by the router */
    float scaling_factor;      /* of the router's probabilities */
    int32_t has_no_backward;   /* no backward of this forward follows on this rank */
    const void* first_plan;    /* NULL; or where this forward is run again for a backward, the first
                                  FLASHMOE_PLAN_HEADER_BYTES of its first plan, which every rank
                                  with a backward gives */
    const char* refusal;       /* NULL; or why this rank refuses its call: flashmoe_plan then brings
                                  no tokens, and the call fails on every rank with FLASHMOE_REFUSED */
} FlashMoEInput;

/* One call of a pass. Rows come in blocks of 128 and are of the problem's dtype. */
typedef struct {
    uint32_t struct_size;
    int32_t num_row_blocks;     /* that the buffers hold */
    int32_t num_tokens;         /* of this rank; those of the plan, if there is one */
    int32_t grad_probs_dtype;   /* FlashMoEDtype; backward only */
    int32_t layer;              /* comes back in the launch's record */
    int32_t grad_columns;       /* of grad_probs: num_experts, or num_choices; backward only */
    int32_t copies_are_current; /* in FP8: weight_copies has what an earlier pass of this direction,
                                   on this stream or awaited by it, made of the same values; 0: this
                                   pass fills it */
    const void* plan;
    const void* weight_maps; /* device copy */
    void* weight_copies;     /* the copies that weight_maps has been encoded for */
    const void* biases;      /* device, 16-byte aligned biases: for each local slot a pointer to
                                fc1's biases [fc1_rows], then to fc2's [hidden]; or NULL */
    void* rows;       /* num_row_blocks * row_block_bytes: the received x, written by a forward,
                         by flashmoe_gather or by a backward that has x, read by a backward for
                         fc1's gradients; NULL if it computes none of them, neither of local experts
                         nor in spare slots, or in a pass that reads tokens (FlashMoETokens). A
                         forward on one of several ranks that has no preact may leave blocks of
                         this rank's own rows as they were, and read x in their place. In FP8 a row
                         has a byte for each value, then a float32 scale for each 128 of them, then
                         zeros up to a multiple of 16 bytes */
    void* preact;     /* num_row_blocks * preact_block_bytes: written by a forward for its
                         backward; NULL if none will follow */
    void* scratch;    /* num_row_blocks * scratch_block_bytes[is backward]: free after the
                         launch */
    void* out;        /* [num_tokens, hidden]: layer output, or gradient of x */
    void* grad_probs; /* [num_tokens, grad_columns], as probs; backward only */
    const void* x;    /* backward only: the forward's, if its rows were not kept and the backward
                         reads or copies tokens (FlashMoETokens); else NULL */
} FlashMoELaunch;

/* Collective. The first half of a forward whose host wants to know the number of rows before it
 * allocates: publishes routing and rows, and places every row that this rank's experts receive. */
FLASHMOE_EXPORT int flashmoe_plan(const FlashMoEProblem* problem,
                                  const FlashMoEGroup* group,
                                  const FlashMoEInput* input,
                                  void* plan);

/* Waits on the host until the plan is there; gives the received blocks of 128 rows (pad rows
 * included), the received rows, and a mask of the ranks that have no backward of this forward. If
 * some rank's routing or call was refused, the plan fails on every rank, and *is_heard_late tells
 * whether a rank called flashmoe_forward alone, so that its host, which does not wait, learns of it
 * at a later call. The bound of time is the plan's own: what is ahead of it on the stream may take
 * as long as it likes. */
FLASHMOE_EXPORT int flashmoe_await_plan(const FlashMoEProblem* problem,
                                        const FlashMoEGroup* group,
                                        int32_t* num_row_blocks,
                                        int32_t* num_rows,
                                        uint32_t* unfollowed,
                                        int32_t* is_heard_late);

/* Collective. The whole layer in one launch: routing exchange, plan, dispatch, FFN and combine; or
 * after flashmoe_plan all but the first two. num_row_blocks bounds what a rank may receive: past it
 * every rank's output is NaN and the mailbox holds FLASHMOE_TOO_MANY_ROWS. */
FLASHMOE_EXPORT int flashmoe_forward(const FlashMoEProblem* problem,
                                     const FlashMoEGroup* group,
                                     const FlashMoEInput* input,
                                     const FlashMoELaunch* launch,
                                     int32_t is_planned);

/* Collective. Settles on the replicas of the next forward, ahead of it: from the routes that are
 * expected of it all ranks plan which experts the spare slots hold, and owners push their weights,
 * on few SMs, concurrently with other streams' kernels. The forward plans from its own routing
 * which tokens use them, and its backward pushes weights again.
 *   route_counts  device, [num_experts]: this rank's routes to each expert
 *   weight_maps   device copy; or NULL on a rank that pushes nothing, whose forward is to refuse
 *   biases        as in FlashMoELaunch */
FLASHMOE_EXPORT int flashmoe_settle(const FlashMoEProblem* problem,
                                    const FlashMoEGroup* group,
                                    const uint32_t* route_counts,
                                    const void* weight_maps,
                                    const void* biases);

/* Collective. Pulls the rows of a forward again, from the same x, along its saved plan into
 * launch->rows. It reads only num_row_blocks, num_tokens, plan and rows of `launch`. */
FLASHMOE_EXPORT int flashmoe_gather(const FlashMoEProblem* problem,
                                    const FlashMoEGroup* group,
                                    const FlashMoELaunch* launch,
                                    const void* x);

/* Collective. All gradients: dispatches grad_out along the saved plan (an epoch of its own).
 *   grad_table   device copy, of gradients for biases too if `launch` has biases
 *   grads_dtype  the dtype that the table was encoded for
 *   accumulate   adds to the values in place
 *   number       for flashmoe_await_fc2_grads: larger than that of the group's last backward; or 0
 *                in a CUDA graph, whose replays would tell of a number long past */
FLASHMOE_EXPORT int flashmoe_backward(const FlashMoEProblem* problem,
                                      const FlashMoEGroup* group,
                                      const FlashMoELaunch* launch,
                                      const void* grad_out,
                                      const void* grad_table,
                                      int32_t grads_dtype,
                                      int32_t accumulate,
                                      uint64_t number);

/* Rows that a backward leaves in its scratch memory and plan: the factors of weights' gradients,
 * for callers that want other products of them. An expert's rows follow one another from the first
 * of its blocks on; what lies between its last row and the next expert's block is unspecified. */
typedef struct {
    uint32_t struct_size;
    const void* grad_out;        /* [row][hidden]: gradients of the layer's output; or NULL where
                                    they were read at their tokens */
    const void* grad_preact;     /* [row][fc1_rows]: gradients of fc1's outputs */
    const void* act;             /* [row][intermediate]: fc2's inputs, times probabilities */
    const void* x;               /* [row][hidden]: of FP8 experts, what fc1's inputs stand for; else
                                    NULL, and the launch's rows have them */
    const int32_t* expert_rows;  /* [local slot]: its number of rows */
    const int32_t* expert_block; /* [local slot + 1]: its first block of 128 rows, and the end */
    const int32_t* row_tokens;   /* [row][2]: the token on its rank, and a word of the plan's own */
} FlashMoEBackwardRows;

/* Tells where they are after flashmoe_backward of the same launch, whose num_row_blocks, plan and
 * scratch it reads. */
FLASHMOE_EXPORT int flashmoe_backward_rows(const FlashMoEProblem* problem,
                                           const FlashMoELaunch* launch,
                                           FlashMoEBackwardRows* rows);

/* Makes a stream wait until the backward of that number, which has been launched, or a later one
 * has the gradients of all fc2 weights (not of biases) complete, while it may still compute fc1's.
 */
FLASHMOE_EXPORT int flashmoe_await_fc2_grads(const FlashMoEGroup* group,
                                             uint64_t number,
                                             void* stream);

/* ---- Faults: why a launch gave up ------------------------------------------------------------ */

/* The fault in the mailbox after a wait that ran out of time, a bad routing or a refused call.
 * Every rank has the same fault of the last two kinds, and `rank` is the rank that caused it. */
typedef struct {
    uint32_t code; /* FlashMoEStatus */
    uint32_t wait; /* flashmoe::Wait */
    int32_t rank;
    int32_t peer;
    int32_t index;
    uint32_t epoch;
    uint32_t expected;
    uint32_t seen; /* FLASHMOE_UNMATCHED: a mask of the ranks that have no backward */
    char reason[FLASHMOE_REASON_BYTES]; /* FLASHMOE_REFUSED has FlashMoEInput.refusal here */
} FlashMoEFault;

/* The awaited thing of FlashMoEFault.wait, in words. */
FLASHMOE_EXPORT const char* flashmoe_wait_name(uint32_t wait);

/* Reads a fault out of the mailbox; code 0 if there is none. Usable after any CUDA error. */
FLASHMOE_EXPORT int flashmoe_read_fault(const FlashMoEGroup* group, FlashMoEFault* fault);

/* Forgets a fault, so that the group can be used again; waits for the stream. */
FLASHMOE_EXPORT int flashmoe_clear_fault(const FlashMoEGroup* group);

/* ---- Counters and records: what launches did ------------------------------------------------- */

/* The counts of this rank's launches since the workspace was zeroed. */
typedef struct {
    uint64_t nanoseconds[FLASHMOE_NUM_SPANS];    /* by flashmoe::Span, summed over CTAs and warps:
                                                    waited, or busy */
    uint64_t rows_pulled[FLASHMOE_MAX_RANKS];    /* by rank, the own one too: fetched by dispatch */
    uint64_t results_pushed[FLASHMOE_MAX_RANKS]; /* likewise: delivered by combine */
    uint64_t pad_rows_pulled;                    /* among them */
    uint64_t pad_rows_made;                      /* written into this rank's own buffers */
    uint64_t rows_pulled_in_fp8[FLASHMOE_MAX_RANKS]; /* among rows_pulled */
} FlashMoECounters;

/* Reads the counters; waits for the stream. */
FLASHMOE_EXPORT int flashmoe_read_counters(const FlashMoEGroup* group, FlashMoECounters* counters);

/* The record of one launch of a layer. */
typedef struct {
    uint64_t sequence; /* 1 for the group's first launch */
    uint32_t checksum;
    uint32_t epoch;
    int32_t layer;
    int32_t is_backward;
    int32_t num_ctas;
    int32_t num_tokens;     /* this rank's */
    int32_t num_rows;       /* received, without pad rows */
    int32_t num_row_blocks; /* blocks of 128 rows */
    int32_t num_counts;     /* words of expert_rows */
    int32_t spare_slots;
    uint64_t begin_ns; /* by the GPU's global timer */
    uint64_t end_ns;
    FlashMoECounters counters; /* sums over this launch and all before */
    /* Rows of each local slot. If there are spare ones, then the experts in these, or -1, how many
     * replicas of this rank's experts there are, an expert's elements of weights and biases,
     * divided by 64, how many routes of this rank's tokens stay on it, and how many there are. */
    int32_t expert_rows[FLASHMOE_MAX_LOCAL_EXPERTS];
} FlashMoERecord;

/* Gives the record of a launch, without waiting. record->sequence is 0 if the launch has not ended
 * yet, or a later one is just writing over its record, and larger than asked for if the ring of
 * FLASHMOE_NUM_RECORDS has gone round. */
FLASHMOE_EXPORT int flashmoe_read_record(const FlashMoEGroup* group,
                                         uint64_t sequence,
                                         FlashMoERecord* record);

#ifdef __cplusplus
}
#endif

#endif /* FLASHMOE_INCLUDE_FLASHMOE_H_ */
