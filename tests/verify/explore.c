/* explore.c: runs a client under the executions that C11 allows, one after the other.
 *
 * Memory. Each atomic word has a list of its stores in modification order. A thread has a view: per
 * word the latest store that it knows of, which is the oldest that it may still read. A release
 * store carries the view of its thread, an acquire load takes over what the store carries, and a
 * read-modify-write hands on what the store it read carried (a release sequence; plain stores of
 * the same thread don't continue one, as in C++20, which is less than C11 grants). A store may be
 * put anywhere behind what its thread knows, but not between a read-modify-write and what that
 * read. Sequentially consistent operations must have a single order S that agrees with
 * happens-before, with each word's order and with what is read: what would make that impossible is
 * not done. This is RC11 with S consistent with happens-before (C11's rule; C++20 asks less of S
 * where sequentially consistent and weaker accesses of one word are mixed). A load can't read from
 * a store that comes later: load buffering, which no compiler here produces, is left out.
 *
 * Plain accesses are found by the compiler's instrumentation for thread sanitizers, of which the
 * run time is here: two that conflict must be ordered by happens-before, else they are a race.
 *
 * Time stands still. A thread that sleeps on a word sleeps until it is woken; when everybody sleeps
 * that is a failure, a lost wake-up (or, up to client->time_outs times, 250 ms pass).
 *
 * Executions. Threads are coroutines that stop before each operation on an atomic word. The
 * exhaustive search is a depth-first one with replay, with dynamic partial order reduction (source
 * sets; sleep sets): two operations depend on each other when they are on one word and one of them
 * changes it. A load goes behind a store only if its thread's past, or the store that it reads,
 * depends on that store: otherwise the execution in which the load came first has the same outcome,
 * and is explored. (litmus.c compares this with a search that leaves out nothing.) The
 * random search draws the thread, and what is read, with weights drawn for each execution.
 */
#include "explore.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "model.h"

#define MAX_WORDS 256
#define MAX_STORES 8192
#define MAX_PER_WORD 512
#define MAX_EVENTS 16384
#define STACK_BYTES (256u << 10)
#define HEAP_BYTES (1u << 20)
#define SHADOW_CELLS (1u << 16) /* each for 8 bytes of plain memory */
#define SLICE UINT64_C(250000000)
#define IDLE_MAX 10
#define POLLS_MAX 50 /* in one random execution, which then ends as the exhaustive ones do */

enum kind { LOCAL, LOAD, STORE, RMW, WAIT, WAKE };
static const char *const KINDS[] = {"local", "load", "store", "rmw", "wait", "wake"};
static const char *const ORDERS[] = {"relaxed", "acquire", "release", "acqrel", "seqcst"};

struct view {
    uint16_t at[MAX_WORDS]; /* a store's number, 0: the word's first value */
    uint16_t clock[VERIFY_MAX_THREADS];
};

struct store {
    uint64_t value;
    uint16_t position; /* in the word's order */
    int16_t thread;    /* -1: the first value */
    int event;
    bool by_rmw; /* must stay next to what it read */
    bool carries;
    struct view view;
};

struct word {
    char *address;
    uint32_t bytes;
    uint16_t n;
    uint16_t order[MAX_PER_WORD];
    int last_event;
};

struct event {
    uint8_t thread, kind, order;
    int16_t word;
    int previous; /* event on the same word */
    uint64_t value;
    uint16_t clock[VERIFY_MAX_THREADS]; /* what it depends on */
};

struct node {
    uint8_t thread, backtrack, done, sleep;
    uint16_t choice, choices;
};

enum state { READY, ASLEEP, POLLING, ENDED, KILLED };

struct thread {
    enum state state;
    jmp_buf at, top; /* where it has stopped, and where it begins */
    enum kind kind;  /* the operation it stopped before */
    int word;
    int asleep_on;
    int polled_at; /* the event before which it looked in vain */
    bool fresh;    /* random: it reads the newest stores */
    struct view view;
    uint16_t clock[VERIFY_MAX_THREADS]; /* dependences */
    uint64_t tls[8];
};

static const struct verify_client *client;
static struct explore_options options;
static struct explore_counts counts;

static struct word words[MAX_WORDS];
static int n_words;
static struct store stores[MAX_STORES];
static int n_stores;
static struct event events[MAX_EVENTS];
static int n_events;
static struct node nodes[MAX_EVENTS];
static int n_nodes;    /* of the stack */
static int replay_end; /* nodes before it are given */

static struct thread threads[VERIFY_MAX_THREADS];
static int current;
static bool exploring; /* threads run; else words are plain memory */
static bool starting;
static jmp_buf to_main;
enum outcome { OUTCOME_ENDED = 1, OUTCOME_BLOCKED, OUTCOME_REDUNDANT, OUTCOME_FAILED, STOPPED };
static char failure[512];
static uint64_t now;
static unsigned time_outs;
static int polls;
static int last_poller, idle; /* rounds of it in which nobody else did anything */

static char stacks[VERIFY_MAX_THREADS][STACK_BYTES];
static _Alignas(64) char heap[HEAP_BYTES];
static size_t heap_used;

/* fipc_thread_id's variable: one per coroutine */
extern char verify_tls_begin[] __asm__("__start_verify_tls") __attribute__((weak));
extern char verify_tls_end[] __asm__("__stop_verify_tls") __attribute__((weak));

static size_t tls_bytes(void) {
    return verify_tls_begin == NULL ? 0 : (size_t)(verify_tls_end - verify_tls_begin);
}

/* ---- random numbers -------------------------------------------------------------------------- */

static uint64_t random_state;
static uint32_t stay_weight, stale_weight; /* of 256 */

static uint32_t draw(uint32_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 20) % n);
}

/* ---- hash tables: address -> word, address -> shadow cell ------------------------------------ */

struct cell {
    uint64_t address; /* / 8 */
    uint32_t generation;
    int8_t writer;
    uint16_t written;
    uint16_t read[VERIFY_MAX_THREADS];
};
static struct cell cells[SHADOW_CELLS];
static struct {
    uint64_t address;
    uint32_t generation;
    int word;
} word_table[1024];
static uint32_t generation;

static struct cell *cell_of(uint64_t address) {
    for (uint32_t i = (uint32_t)(address * UINT64_C(0x9E3779B97F4A7C15) >> 40);; i++) {
        struct cell *c = &cells[i % SHADOW_CELLS];
        if (c->generation != generation) {
            memset(c, 0, sizeof *c);
            c->address = address;
            c->generation = generation;
            c->writer = -1;
            return c;
        }
        if (c->address == address) {
            return c;
        }
    }
}

_Noreturn static void leave(enum outcome outcome) {
    exploring = false;
    _longjmp(to_main, (int)outcome);
}

_Noreturn static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof failure, format, args);
    va_end(args);
    leave(OUTCOME_FAILED);
}

_Noreturn void verify_fail(const char *file, int line, const char *what) {
    const char *base = strrchr(file, '/');
    fail("%s:%d: %s", base ? base + 1 : file, line, what);
}

static int word_of(const void *p, uint32_t bytes) {
    uint64_t address = (uint64_t)(uintptr_t)p;
    for (uint32_t i = (uint32_t)(address * UINT64_C(0x9E3779B97F4A7C15) >> 50);; i++) {
        i %= 1024;
        if (word_table[i].generation == generation) {
            if (word_table[i].address == address) {
                return word_table[i].word;
            }
            continue;
        }
        if (n_words == MAX_WORDS || n_stores == MAX_STORES) {
            fail("more words than the explorer has room for");
        }
        word_table[i].generation = generation;
        word_table[i].address = address;
        word_table[i].word = n_words;
        struct word *w = &words[n_words];
        *w = (struct word){
            .address = (char *)(uintptr_t)p, .bytes = bytes, .n = 1, .last_event = -1};
        struct store *s = &stores[n_stores];
        s->position = 0;
        s->thread = -1;
        s->by_rmw = s->carries = false;
        s->value = 0;
        memcpy(&s->value, p, bytes);
        w->order[0] = (uint16_t)n_stores++;
        return n_words++;
    }
}

/* ---- views ----------------------------------------------------------------------------------- */

static uint16_t place(uint16_t store) { return store == 0 ? 0 : stores[store].position; }

static void join(struct view *to, const struct view *from) {
    for (int i = 0; i < n_words; i++) {
        if (place(from->at[i]) > place(to->at[i])) {
            to->at[i] = from->at[i];
        }
    }
    for (int i = 0; i < VERIFY_MAX_THREADS; i++) {
        if (from->clock[i] > to->clock[i]) {
            to->clock[i] = from->clock[i];
        }
    }
}

static void copy_view(struct view *to, const struct view *from) {
    memcpy(to->at, from->at, (size_t)n_words * sizeof to->at[0]);
    memset(to->at + n_words, 0, (size_t)(MAX_WORDS - n_words) * sizeof to->at[0]);
    memcpy(to->clock, from->clock, sizeof to->clock);
}

/* ---- plain accesses -------------------------------------------------------------------------- */

static void plain(const void *p, size_t bytes, bool write) {
    const char *c = p;
    if (!exploring || bytes == 0 || (c >= stacks[0] && c < stacks[VERIFY_MAX_THREADS]) ||
        (c >= verify_tls_begin && c < verify_tls_end)) {
        return;
    }
    const struct view *view = &threads[current].view;
    uint64_t last = ((uint64_t)(uintptr_t)c + bytes - 1) / 8;
    for (uint64_t a = (uint64_t)(uintptr_t)c / 8; a <= last; a++) {
        struct cell *cell = cell_of(a);
        if (cell->writer >= 0 && cell->writer != current &&
            cell->written > view->clock[cell->writer]) {
            fail("data race: thread %d %s what thread %d wrote, at %p", current,
                 write ? "writes" : "reads", cell->writer, (void *)(uintptr_t)(a * 8));
        }
        if (!write) {
            cell->read[current] = view->clock[current];
            continue;
        }
        for (int i = 0; i < VERIFY_MAX_THREADS; i++) {
            if (i != current && cell->read[i] > view->clock[i]) {
                fail("data race: thread %d writes what thread %d read, at %p", current, i,
                     (void *)(uintptr_t)(a * 8));
            }
        }
        cell->writer = (int8_t)current;
        cell->written = view->clock[current];
    }
}

#define ACCESS(bytes)                                                                              \
    void __tsan_read##bytes(void *p);                                                              \
    void __tsan_write##bytes(void *p);                                                             \
    void __tsan_unaligned_read##bytes(void *p);                                                    \
    void __tsan_unaligned_write##bytes(void *p);                                                   \
    void __tsan_read##bytes(void *p) { plain(p, bytes, false); }                                   \
    void __tsan_write##bytes(void *p) { plain(p, bytes, true); }                                   \
    void __tsan_unaligned_read##bytes(void *p) { plain(p, bytes, false); }                         \
    void __tsan_unaligned_write##bytes(void *p) { plain(p, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_init(void);
void __tsan_func_entry(void *pc);
void __tsan_func_exit(void *pc);
void __tsan_read_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes);
void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void *pc) { (void)pc; }
void __tsan_read_range(void *p, size_t bytes) { plain(p, bytes, false); }
void __tsan_write_range(void *p, size_t bytes) { plain(p, bytes, true); }

void *verify_memcpy(void *to, const void *from, size_t n) {
    plain(from, n, false);
    plain(to, n, true);
    return memcpy(to, from, n);
}
void *verify_memset(void *to, int c, size_t n) {
    plain(to, n, true);
    return memset(to, c, n);
}
int verify_memcmp(const void *a, const void *b, size_t n) {
    plain(a, n, false);
    plain(b, n, false);
    return memcmp(a, b, n);
}

/* A heap that begins anew with each execution, and in which nothing is used twice. */
void *verify_malloc(size_t n) {
    size_t bytes = (n + 63) / 64 * 64;
    if (heap_used + bytes > HEAP_BYTES) {
        fail("more memory than the explorer has");
    }
    heap_used += bytes;
    return heap + heap_used - bytes;
}
void *verify_calloc(size_t n, size_t size) {
    void *p = verify_malloc(n * size);
    memset(p, 0, n * size);
    return p;
}
int verify_memalign(void **out, size_t align, size_t n) {
    (void)align;
    *out = verify_malloc(n);
    return 0;
}
void verify_free(void *p) { (void)p; }

/* ---- dependence, and what to try later ------------------------------------------------------- */

static bool dependent(enum kind a, int a_word, enum kind b, int b_word) {
    if (a_word != b_word || a_word < 0) {
        return false;
    }
    bool a_changes = a == STORE || a == RMW;
    bool b_changes = b == STORE || b == RMW;
    if (a_changes || b_changes) {
        return a != WAKE && b != WAKE;
    }
    return (a == WAKE && (b == WAIT || b == WAKE)) || (a == WAIT && b == WAKE);
}

static bool before(const struct event *a, const struct event *b) {
    return b->clock[a->thread] >= a->clock[a->thread];
}

/* Event n could have come before event i: some execution that begins so at node i is needed. */
static void reverse(int i, int n) {
    const struct event *e = &events[i];
    uint8_t seen = 0;
    uint8_t first = 0;
    static int chain[MAX_EVENTS];
    int length = 0;
    for (int j = i + 1; j <= n; j++) {
        const struct event *f = &events[j];
        if (j < n && before(e, f)) {
            continue;
        }
        if (!(seen & 1u << f->thread)) {
            seen |= (uint8_t)(1u << f->thread);
            bool free = true;
            for (int k = 0; k < length && free; k++) {
                free = !before(&events[chain[k]], f);
            }
            if (free) {
                first |= (uint8_t)(1u << f->thread);
            }
        }
        chain[length++] = j;
    }
    struct node *node = &nodes[i];
    if ((first & (node->backtrack | node->done | node->sleep)) == 0) {
        uint8_t mine = (uint8_t)(1u << events[n].thread);
        node->backtrack |= first & mine ? mine : (uint8_t)(first & -first);
    }
}

/* The event takes place: notes what it depends on. */
static struct event *note(enum kind kind, int word, enum verify_order order) {
    if (n_events == MAX_EVENTS) {
        fail("an execution without end");
    }
    struct thread *t = &threads[current];
    struct event *e = &events[n_events];
    if (current != last_poller) {
        idle = 0;
        for (int i = 0; i < VERIFY_MAX_THREADS; i++) {
            threads[i].fresh = false;
        }
    }
    *e = (struct event){.thread = (uint8_t)current,
                        .kind = (uint8_t)kind,
                        .order = (uint8_t)order,
                        .word = (int16_t)word,
                        .previous = word >= 0 ? words[word].last_event : -1};
    memcpy(e->clock, t->clock, sizeof e->clock);
    int races[64];
    int n = 0;
    for (int i = e->previous; i >= 0; i = events[i].previous) {
        const struct event *d = &events[i];
        if (d->thread == current || !dependent((enum kind)d->kind, word, kind, word) ||
            e->clock[d->thread] >= d->clock[d->thread]) {
            continue;
        }
        if (n < 64) {
            races[n++] = i;
        }
        for (int k = 0; k < VERIFY_MAX_THREADS; k++) {
            e->clock[k] = e->clock[k] > d->clock[k] ? e->clock[k] : d->clock[k];
        }
    }
    e->clock[current]++;
    memcpy(t->clock, e->clock, sizeof e->clock);
    if (word >= 0) {
        words[word].last_event = n_events;
    }
    if (!options.at_random && !options.plain && n_events >= replay_end - 1) {
        for (int i = 0; i < n; i++) {
            reverse(races[i], n_events);
        }
    }
    t->view.clock[current]++;
    n_events++;
    counts.steps++;
    return e;
}

/* The event that is about to take place has n outcomes: which? 0 is the one of an interleaving. */
static unsigned choose(unsigned n) {
    if (options.at_random) {
        if (n == 1 || threads[current].fresh || draw(256) >= stale_weight) {
            return 0;
        }
        return 1 + draw(n - 1);
    }
    struct node *node = &nodes[n_events];
    node->choices = (uint16_t)n;
    return node->choice;
}

/* ---- scheduling ------------------------------------------------------------------------------ */

_Noreturn static void jump_to(int to) {
    if (tls_bytes() > 0 && to != current) {
        memcpy(threads[current].tls, verify_tls_begin, tls_bytes());
        memcpy(verify_tls_begin, threads[to].tls, tls_bytes());
    }
    current = to;
    _longjmp(threads[to].at, 1);
}

static uint8_t enabled_threads(void) {
    uint8_t mask = 0;
    for (unsigned i = 0; i < client->n; i++) {
        if (threads[i].state == READY) {
            mask |= (uint8_t)(1u << i);
        }
    }
    return mask;
}

static void time_passes(void) {
    uint16_t all[VERIFY_MAX_THREADS] = {0};
    for (unsigned i = 0; i < client->n; i++) {
        for (int k = 0; k < VERIFY_MAX_THREADS; k++) {
            all[k] = all[k] > threads[i].clock[k] ? all[k] : threads[i].clock[k];
        }
    }
    now += SLICE;
    time_outs++;
    for (unsigned i = 0; i < client->n; i++) {
        struct thread *t = &threads[i];
        memcpy(t->clock, all, sizeof all); /* it depends on all there was */
        if (t->state == ASLEEP) {
            t->state = READY;
            t->kind = LOCAL;
            t->word = -1;
        }
    }
}

static bool any(enum state state) {
    for (unsigned i = 0; i < client->n; i++) {
        if (threads[i].state == state) {
            return true;
        }
    }
    return false;
}

/* Which thread is next? Every one has stopped before its next operation. */
static int next_thread(void) {
    for (unsigned i = 0; i < client->n; i++) {
        if (threads[i].state == POLLING && threads[i].polled_at < n_events) {
            threads[i].state = READY; /* somebody has done something */
        }
    }
    uint8_t enabled = enabled_threads();
    if (enabled == 0 && any(POLLING) && ++idle > IDLE_MAX) {
        if (!any(ASLEEP) || time_outs >= client->time_outs) {
            fail("a loop that nothing ends");
        }
        idle = 0;
        time_passes();
        enabled = enabled_threads();
    }
    if (enabled == 0 && any(POLLING)) {
        for (unsigned i = 0; i < client->n; i++) {
            if (threads[i].state == POLLING) {
                threads[i].state = READY;
                threads[i].fresh = true; /* what was stored is seen in the end */
            }
        }
        enabled = enabled_threads();
    }
    if (enabled == 0 && any(ASLEEP) && !any(KILLED)) {
        if (time_outs >= client->time_outs) {
            fail("lost wake-up: everybody sleeps");
        }
        time_passes();
        enabled = enabled_threads();
    }
    if (enabled == 0) {
        leave(any(KILLED) ? OUTCOME_BLOCKED : OUTCOME_ENDED);
    }
    if (options.at_random) {
        bool stays = enabled >> current & 1 && draw(256) < stay_weight;
        int t = stays ? current : (int)draw(client->n);
        while (!(enabled >> t & 1)) {
            t = (t + 1) % (int)client->n;
        }
        return t;
    }
    if (n_events == MAX_EVENTS) {
        fail("an execution without end");
    }
    struct node *node = &nodes[n_events];
    if (n_events < replay_end) {
        return node->thread;
    }
    uint8_t sleep = 0;
    if (n_events > 0 && !options.plain) {
        const struct node *parent = &nodes[n_events - 1];
        const struct event *e = &events[n_events - 1];
        for (unsigned i = 0; i < client->n; i++) {
            const struct thread *t = &threads[i];
            if ((parent->sleep | parent->done) >> i & 1 && i != e->thread && t->state == READY &&
                !dependent(t->kind, t->word, (enum kind)e->kind, e->word)) {
                sleep |= (uint8_t)(1u << i);
            }
        }
    }
    uint8_t open = (uint8_t)(enabled & ~sleep);
    if (open == 0) {
        leave(OUTCOME_REDUNDANT);
    }
    int t = current;
    if (!(open >> t & 1)) {
        t = __builtin_ctz(open);
    }
    *node = (struct node){.thread = (uint8_t)t,
                          .backtrack = options.plain ? enabled : (uint8_t)(1u << t),
                          .sleep = sleep};
    n_nodes = n_events + 1;
    counts.states++;
    return t;
}

/* Stops before an operation, and comes back when it is this thread's turn. */
static void stop_before(enum kind kind, int word) {
    struct thread *t = &threads[current];
    t->kind = kind;
    t->word = word;
    if (starting) {
        if (_setjmp(t->at) == 0) {
            _longjmp(to_main, STOPPED);
        }
        return;
    }
    int next = next_thread();
    if (next == current) {
        return;
    }
    if (_setjmp(t->at) == 0) {
        jump_to(next);
    }
}

static void thread_main(void) {
    _setjmp(threads[current].top);
    client->run[current]();
    threads[current].state = ENDED;
    if (starting) {
        _longjmp(to_main, STOPPED);
    }
    jump_to(next_thread());
}

/* Ends the thread at this place, without a word. */
_Noreturn static void kill_thread(void) {
    threads[current].state = KILLED;
    if (starting) {
        _longjmp(to_main, STOPPED);
    }
    jump_to(next_thread());
}

/* ---- operations ------------------------------------------------------------------------------ */

static bool acquires(enum verify_order o) {
    return o == ORDER_acquire || o == ORDER_acqrel || o == ORDER_seqcst;
}
static bool releases(enum verify_order o) {
    return o == ORDER_release || o == ORDER_acqrel || o == ORDER_seqcst;
}

static uint64_t raw_load(const void *p, uint32_t bytes) {
    uint64_t v = 0;
    memcpy(&v, p, bytes);
    return v;
}

/* ---- the order S ------------------------------------------------------------------------------ */

/* A sequentially consistent operation. S must agree with the order in which each thread has them,
 * with happens-before, with each word's order, and with "reads what is before": there is such an S
 * as long as these make no circle. */
#define MAX_SEQCST 512
struct seqcst {
    uint8_t thread;
    int16_t word;
    uint16_t clock;                    /* its thread's, of happens-before */
    int read, put;                     /* stores; -1: none */
    uint64_t earlier[MAX_SEQCST / 64]; /* in S, whatever S is */
};
static struct seqcst in_s[MAX_SEQCST];
static int n_in_s;

static void add(uint64_t *set, int i) { set[i / 64] |= UINT64_C(1) << (i % 64); }
static bool has(const uint64_t *set, int i) { return set[i / 64] >> (i % 64) & 1; }

/* What comes before and what comes after an operation that reads the store at position `read` of the
 * word's order and stores behind position `behind` (-1: it doesn't). False: a circle. */
static bool fits_s(int word, int read, int behind, uint64_t *earlier, uint64_t *later) {
    const struct word *w = &words[word];
    const struct view *mine = &threads[current].view;
    const struct store *from = read < 0 ? NULL : &stores[w->order[read]];
    memset(earlier, 0, sizeof in_s[0].earlier);
    memset(later, 0, sizeof in_s[0].earlier);
    for (int i = 0; i < n_in_s; i++) {
        const struct seqcst *a = &in_s[i];
        bool before = mine->clock[a->thread] >= a->clock ||
                      (from != NULL && from->carries && from->view.clock[a->thread] >= a->clock);
        bool after = false;
        if (a->word == word && a->put >= 0) {
            int at = stores[a->put].position;
            after = (read >= 0 && at > read) || (behind >= 0 && at > behind);
            before = before || (behind >= 0 && at <= behind);
        }
        if (a->word == word && a->read >= 0 && behind >= 0) {
            before = before || place((uint16_t)a->read) <= behind;
        }
        if (before) {
            add(earlier, i);
            for (unsigned k = 0; k < MAX_SEQCST / 64; k++) {
                earlier[k] |= a->earlier[k];
            }
        }
        if (after) {
            add(later, i);
        }
    }
    for (unsigned k = 0; k < MAX_SEQCST / 64; k++) {
        if (earlier[k] & later[k]) {
            return false;
        }
    }
    return true;
}

/* Takes a place in S; to be called when the event is noted and nothing is stored yet. */
static void enter_s(int word, int read, int behind) {
    if (n_in_s == MAX_SEQCST) {
        fail("more sequentially consistent operations than the explorer has room for");
    }
    struct seqcst *e = &in_s[n_in_s];
    uint64_t later[MAX_SEQCST / 64];
    fits_s(word, read, behind, e->earlier, later);
    e->thread = (uint8_t)current;
    e->word = (int16_t)word;
    e->clock = threads[current].view.clock[current];
    e->read = read < 0 ? -1 : words[word].order[read];
    e->put = behind < 0 ? -1 : n_stores; /* the one that comes */
    for (int i = 0; i < n_in_s; i++) {
        bool moves = has(later, i);
        for (int k = 0; k < n_in_s && !moves; k++) {
            moves = has(later, k) && has(in_s[i].earlier, k);
        }
        if (moves) {
            add(in_s[i].earlier, n_in_s);
            for (unsigned k = 0; k < MAX_SEQCST / 64; k++) {
                in_s[i].earlier[k] |= e->earlier[k];
            }
        }
    }
    n_in_s++;
}

/* The thread's past depends on this store: going behind it is no mere change of order. */
static bool known(const struct store *s) {
    if (options.at_random || options.plain || s->thread < 0 || s->thread == current) {
        return true;
    }
    return threads[current].clock[s->thread] >= events[s->event].clock[s->thread];
}

/* Going behind the stores after position i is no mere change of order: each of them took place
 * before something that the thread, or a store up to there, depends on. */
static bool must_go_behind(const struct word *w, int i) {
    for (int j = i + 1; j < w->n; j++) {
        const struct store *later = &stores[w->order[j]];
        bool needed = known(later);
        for (int k = 1; k <= i && !needed; k++) {
            needed = events[stores[w->order[k]].event].clock[later->thread] >=
                     events[later->event].clock[later->thread];
        }
        if (!needed) {
            return false;
        }
    }
    return true;
}

enum want { TO_LOAD, TO_FOLLOW, TO_CHANGE };

/* Positions in the word's order that may be read (TO_LOAD), stored behind (TO_FOLLOW), or read and
 * stored behind (TO_CHANGE; of value `match` only, if that isn't NULL: the others may be read). */
static unsigned places(int word, enum verify_order order, enum want want, const uint64_t *match,
                       uint16_t *out) {
    const struct word *w = &words[word];
    const uint16_t low = place(threads[current].view.at[word]);
    unsigned n = 0;
    for (int i = w->n - 1; i >= low; i--) {
        const struct store *s = &stores[w->order[i]];
        if (i + 1 < w->n && !must_go_behind(w, i)) {
            continue;
        }
        bool followed = i + 1 < w->n && stores[w->order[i + 1]].by_rmw;
        bool puts =
            want == TO_FOLLOW || (want == TO_CHANGE && (match == NULL || s->value == *match));
        uint64_t earlier[MAX_SEQCST / 64], later[MAX_SEQCST / 64];
        if (order == ORDER_seqcst &&
            !fits_s(word, want == TO_FOLLOW ? -1 : i, puts ? i : -1, earlier, later)) {
            continue;
        }
        bool may = want == TO_LOAD || !followed || (match != NULL && s->value != *match);
        if (may) {
            out[n++] = (uint16_t)i;
        }
    }
    return n;
}

static void take_over(int word, uint16_t store, enum verify_order order) {
    struct view *view = &threads[current].view;
    if (stores[store].position > place(view->at[word])) {
        view->at[word] = store;
    }
    if (acquires(order) && stores[store].carries) {
        join(view, &stores[store].view);
    }
}

static void put(int word, unsigned behind, uint64_t value, enum verify_order order,
                const struct store *read) {
    struct word *w = &words[word];
    if (n_stores == MAX_STORES || w->n == MAX_PER_WORD) {
        fail("an execution without end: more stores than there is room for");
    }
    struct thread *t = &threads[current];
    uint16_t number = (uint16_t)n_stores++;
    for (unsigned i = w->n; i > behind + 1; i--) {
        w->order[i] = w->order[i - 1];
        stores[w->order[i]].position = (uint16_t)i;
    }
    w->n++;
    w->order[behind + 1] = number;
    struct store *s = &stores[number];
    s->value = value;
    s->position = (uint16_t)(behind + 1);
    s->thread = (int16_t)current;
    s->event = n_events - 1;
    s->by_rmw = read != NULL;
    t->view.at[word] = number;
    s->carries = releases(order) || (read != NULL && read->carries);
    if (s->carries) {
        memset(&s->view, 0, sizeof s->view);
        if (releases(order)) {
            copy_view(&s->view, &t->view);
            t->view.clock[current]++; /* what comes now is not carried */
        }
        if (read != NULL && read->carries) {
            join(&s->view, &read->view);
        }
    }
}

uint64_t verify_load(const void *p, uint32_t bytes, enum verify_order order) {
    if (!exploring) {
        return raw_load(p, bytes);
    }
    int word = word_of(p, bytes);
    stop_before(LOAD, word);
    uint16_t at[MAX_PER_WORD];
    unsigned n = places(word, order, TO_LOAD, NULL, at);
    unsigned which = choose(n);
    struct event *e = note(LOAD, word, order);
    if (order == ORDER_seqcst) {
        enter_s(word, at[which], -1);
    }
    uint16_t store = words[word].order[at[which]];
    take_over(word, store, order);
    return e->value = stores[store].value;
}

void verify_store(void *p, uint32_t bytes, uint64_t v, enum verify_order order) {
    if (!exploring) {
        memcpy(p, &v, bytes);
        return;
    }
    int word = word_of(p, bytes);
    stop_before(STORE, word);
    uint16_t at[MAX_PER_WORD];
    unsigned n = places(word, order, TO_FOLLOW, NULL, at);
    unsigned which = choose(n);
    struct event *e = note(STORE, word, order);
    if (order == ORDER_seqcst) {
        enter_s(word, -1, at[which]);
    }
    e->value = v;
    put(word, at[which], v, order, NULL);
}

static uint64_t changed(enum verify_change change, uint64_t seen, uint64_t v, uint32_t bytes) {
    uint64_t result = change == CHANGE_or ? (seen | v) : change == CHANGE_add ? seen + v : v;
    return bytes == 4 ? (uint32_t)result : result;
}

uint64_t verify_rmw(void *p, uint32_t bytes, enum verify_change change, uint64_t v,
                    enum verify_order order) {
    if (!exploring) {
        uint64_t seen = raw_load(p, bytes);
        uint64_t result = changed(change, seen, v, bytes);
        memcpy(p, &result, bytes);
        return seen;
    }
    int word = word_of(p, bytes);
    stop_before(RMW, word);
    uint16_t at[MAX_PER_WORD];
    unsigned n = places(word, order, TO_CHANGE, NULL, at);
    unsigned which = choose(n);
    struct event *e = note(RMW, word, order);
    if (order == ORDER_seqcst) {
        enter_s(word, at[which], at[which]);
    }
    uint16_t store = words[word].order[at[which]];
    take_over(word, store, order);
    e->value = changed(change, stores[store].value, v, bytes);
    put(word, at[which], e->value, order, &stores[store]);
    return stores[store].value;
}

bool verify_cas(void *p, uint32_t bytes, uint64_t *expected, uint64_t v, enum verify_order order,
                enum verify_order failing) {
    if (!exploring) {
        uint64_t seen = raw_load(p, bytes);
        if (seen != *expected) {
            *expected = seen;
            return false;
        }
        memcpy(p, &v, bytes);
        return true;
    }
    int word = word_of(p, bytes);
    stop_before(RMW, word);
    uint16_t at[MAX_PER_WORD];
    unsigned n = places(word, order, TO_CHANGE, expected, at);
    unsigned which = choose(n);
    uint16_t store = words[word].order[at[which]];
    bool done = stores[store].value == *expected;
    struct event *e = note(RMW, word, done ? order : failing);
    if ((done ? order : failing) == ORDER_seqcst) {
        enter_s(word, at[which], done ? at[which] : -1);
    }
    take_over(word, store, done ? order : failing);
    if (done) {
        e->value = v;
        put(word, at[which], v, order, &stores[store]);
    } else {
        e->value = *expected = stores[store].value;
    }
    return done;
}

unsigned verify_choose(unsigned n) {
    stop_before(LOCAL, -1);
    unsigned which = options.at_random ? draw(n) : choose(n);
    note(LOCAL, -1, ORDER_relaxed)->value = which;
    return which;
}

void verify_poll(void) {
    if (!options.at_random || ++polls > POLLS_MAX) {
        kill_thread();
    }
    threads[current].state = POLLING;
    last_poller = current;
    threads[current].polled_at = n_events;
    stop_before(LOCAL, -1);
    note(LOCAL, -1, ORDER_relaxed);
}

static uint64_t model_now(void *ctx) {
    (void)ctx;
    return now;
}

/* As the kernel does it: one look at the newest value, and to sleep, in one step; no order for
 * anything else. */
static int model_wait(void *ctx, const void *p, uint32_t expected, uint64_t deadline) {
    (void)ctx;
    (void)deadline;
    int word = word_of(p, 4);
    stop_before(WAIT, word);
    struct event *e = note(WAIT, word, ORDER_relaxed);
    const struct word *w = &words[word];
    e->value = stores[w->order[w->n - 1]].value;
    if (e->value == expected) {
        threads[current].state = ASLEEP;
        threads[current].asleep_on = word;
        stop_before(LOCAL, -1);
        note(LOCAL, -1, ORDER_relaxed);
    }
    return FIPC_OK;
}

static void model_wake(void *ctx, const void *p) {
    (void)ctx;
    if (!exploring) {
        return;
    }
    int word = word_of(p, 4);
    stop_before(WAKE, word);
    const struct event *e = note(WAKE, word, ORDER_relaxed);
    for (unsigned i = 0; i < client->n; i++) {
        struct thread *t = &threads[i];
        if (t->state == ASLEEP && t->asleep_on == word) {
            t->state = READY;
            for (int k = 0; k < VERIFY_MAX_THREADS; k++) {
                t->clock[k] = t->clock[k] > e->clock[k] ? t->clock[k] : e->clock[k];
            }
        }
    }
}

const struct fipc_waitops verify_ops = {model_now, model_wait, model_wake, NULL};

/* ---- one execution after the other ----------------------------------------------------------- */

/* Gives the thread its stack, once and for all: an execution begins with a jump to `top`. */
static void make_stack(int i) {
    static bool made[VERIFY_MAX_THREADS];
    if (!made[i]) {
        made[i] = true;
        ucontext_t c;
        getcontext(&c);
        c.uc_stack.ss_sp = stacks[i];
        c.uc_stack.ss_size = STACK_BYTES;
        c.uc_link = NULL;
        makecontext(&c, thread_main, 0);
        setcontext(&c);
    }
    _longjmp(threads[i].top, 1);
}

/* Runs thread i up to its first operation. */
static enum outcome start_thread(int i) {
    struct thread *t = &threads[i];
    memset(t->clock, 0, sizeof t->clock);
    memset(&t->view, 0, sizeof t->view);
    t->view.clock[i] = 1; /* 0 stands for "not yet" */
    t->state = READY;
    t->fresh = false;
    if (tls_bytes() > 0) {
        memset(verify_tls_begin, 0, tls_bytes());
    }
    current = i;
    int stopped = _setjmp(to_main);
    if (stopped == 0) {
        make_stack(i);
    }
    if (tls_bytes() > 0) {
        memcpy(threads[i].tls, verify_tls_begin, tls_bytes());
    }
    return (enum outcome)stopped;
}

static enum outcome start_threads(void) {
    starting = exploring = true;
    for (unsigned i = 0; i < client->n; i++) {
        enum outcome outcome = start_thread((int)i);
        if (outcome != STOPPED) {
            return outcome;
        }
    }
    starting = false;
    return STOPPED;
}

/* What the threads left behind becomes plain memory. */
static void settle(void) {
    for (int i = 0; i < n_words; i++) {
        memcpy(words[i].address, &stores[words[i].order[words[i].n - 1]].value, words[i].bytes);
    }
}

static enum outcome execute(void) {
    generation++;
    n_words = 0;
    n_stores = 1; /* number 0 stands for a word's first value */
    n_events = 0;
    n_in_s = 0;
    heap_used = 0;
    now = UINT64_C(1000000000);
    time_outs = 0;
    polls = idle = 0;
    last_poller = -1;
    exploring = starting = false;
    client->setup();
    enum outcome started = start_threads();
    if (started != STOPPED) {
        return started;
    }
    int outcome = _setjmp(to_main);
    if (outcome == 0) {
        current = 0;
        int first = next_thread();
        if (tls_bytes() > 0) {
            memcpy(verify_tls_begin, threads[first].tls, tls_bytes());
        }
        current = first;
        _longjmp(threads[first].at, 1);
    }
    if (n_events > counts.deepest) {
        counts.deepest = n_events;
    }
    if (outcome == OUTCOME_ENDED) {
        settle();
        outcome = _setjmp(to_main);
        if (outcome == 0) {
            client->finish();
            outcome = OUTCOME_ENDED;
        }
        /* words that setup doesn't write begin the next execution as they began this one */
        for (int i = 0; i < n_words; i++) {
            memcpy(words[i].address, &stores[words[i].order[0]].value, words[i].bytes);
        }
    }
    return (enum outcome)outcome;
}

/* The next branch of the search; false: there is none. */
static bool advance(void) {
    while (n_nodes > 0) {
        struct node *node = &nodes[n_nodes - 1];
        if (node->choice + 1 < node->choices) {
            node->choice++;
            counts.branches++;
            break;
        }
        node->done |= (uint8_t)(1u << node->thread);
        uint8_t open = (uint8_t)(node->backtrack & ~node->done & ~node->sleep);
        if (open != 0) {
            node->thread = (uint8_t)__builtin_ctz(open);
            node->choice = node->choices = 0;
            break;
        }
        n_nodes--;
    }
    replay_end = n_nodes;
    return n_nodes > 0;
}

static void print_trace(void) {
    for (int i = 0; i < n_events; i++) {
        const struct event *e = &events[i];
        char where[96] = "";
        if (e->word >= 0) {
            snprintf(where, sizeof where, "%s %s", explore_place(words[e->word].address),
                     e->kind == WAIT || e->kind == WAKE ? "" : ORDERS[e->order]);
        }
        printf("    %4d  thread %d  %-5s %s = %llu\n", i, e->thread, KINDS[e->kind], where,
               (unsigned long long)e->value);
    }
}

bool explore(const struct verify_client *c, const struct explore_options *o,
             struct explore_counts *out) {
    client = c;
    options = *o;
    options.at_random = o->at_random || c->at_random;
    memset(&counts, 0, sizeof counts);
    n_nodes = replay_end = 0;
    bool passed = true;
    for (uint64_t i = 0;; i++) {
        if (options.at_random) {
            if (i == o->random_executions) {
                break;
            }
            /* each execution's numbers follow from the seed and its count alone */
            random_state = (o->seed + i + 1) * UINT64_C(0x9E3779B97F4A7C15) | 1;
            draw(2);
            const uint32_t weights[] = {0, 64, 128, 192, 240, 252};
            stay_weight = weights[draw(6)];
            stale_weight = weights[draw(5)];
        } else if (i == o->most_executions) {
            counts.cut_short = true;
            break;
        }
        enum outcome outcome = execute();
        counts.executions++;
        counts.blocked += outcome == OUTCOME_BLOCKED;
        counts.redundant += outcome == OUTCOME_REDUNDANT;
        if (outcome == OUTCOME_FAILED) {
            passed = false;
            snprintf(counts.failure, sizeof counts.failure, "%s", failure);
            if (o->trace) {
                print_trace();
            }
            break;
        }
        if (!options.at_random && !advance()) {
            break;
        }
    }
    counts.at_random = options.at_random;
    *out = counts;
    return passed;
}
