/* stress: one writer and many readers, each a process, under everything that happens to them in a
 * long day: sizes from nothing to several chunks, calls that poll, that wait a little and that wait
 * for ever, signals, readers that are slow for a while, forks. Ends with 0 when every reader got
 * every message once, whole and in order, and made progress in every second.
 *
 *   stress --messages 1e9 --mostly-small            as many processes as CPUs
 *   stress --messages 1e8 --mostly-small --over     four times as many
 *   stress --seconds 60 --over                      larger messages
 *
 * Message `seq` is known from its number alone: its length, its bytes (pattern.h) and into how many
 * buffers it is cut. Of every STAMP_EVERY messages one carries the time when its sending began, and
 * a checksum over number, length and time. Prints what was counted, as lines of `name value`.
 */
#include "test.h"

#include <getopt.h>
#include <sched.h>
#include <sys/time.h>

#include "fipc_atomic.h"
#include "peers.h"

#define STAMP_EVERY 32
#define STAMP_BYTES 24      /* number, time, checksum */
#define SMALL_BYTES 64      /* most of a small message: what a step's bookkeeping needs */
#define STALL_NS 100000000u /* 100 ms without a message: longer than a time slice, or two */
#define NAP_EVERY 20000     /* messages between a slow reader's naps, on average */
#define NAP_NS 2000000u     /* longest nap */
#define FORK_NS 200000000u  /* between the forks of one process */
#define SIGNAL_US 7000      /* between signals; prime to the slices of a wait */
#define PIECES_MAX 5
#define MAX_PROCESSES 1024

static struct {
    uint64_t messages;
    uint64_t seconds;
    uint64_t seed;
    uint64_t large_every; /* one message of so many may be large, the others are small */
    uint64_t window_ms;   /* in each such window every reader must make progress */
    uint32_t processes;
    bool quiet; /* no signals, naps and forks */
} options = {.seed = 1, .large_every = 16, .window_ms = 1000};

static const uint64_t chunk_bytes = UINT64_C(256) << 10;
static const uint64_t largest = 5 * (UINT64_C(256) << 10) + 999;

/* ---- what was counted: one per process, in memory that all share ---------------------------- */

/* Times in 16 steps per power of two: 6 % wide. */
#define BUCKETS 1024

struct tally {
    _Alignas(128) fipc_a64 messages; /* done, for the watch */
    uint64_t bytes, digest;
    uint64_t polls, timeouts, interrupts, naps, forks, stalls, longest_ns;
    uint64_t stamped, least_ns, most_ns;
    uint64_t bucket[BUCKETS];
};

struct shared {
    fipc_a64 last;        /* what the writer sent in all, once it knows; 0 before */
    struct tally tally[]; /* the writer's, then the readers' */
};
static struct shared *shared;

static unsigned bucket_of(uint64_t ns) {
    if (ns < 16) {
        return (unsigned)ns;
    }
    unsigned power = 63 - (unsigned)__builtin_clzll(ns);
    return (power - 3) * 16 + (unsigned)(ns >> (power - 4) & 15);
}

static uint64_t bucket_top(unsigned b) {
    return b < 16 ? b : ((uint64_t)(16 + b % 16) + 1) << (b / 16 - 1);
}

static void count_latency(struct tally *t, uint64_t ns) {
    t->least_ns = t->stamped == 0 || ns < t->least_ns ? ns : t->least_ns;
    t->most_ns = ns > t->most_ns ? ns : t->most_ns;
    t->stamped++;
    t->bucket[bucket_of(ns)]++;
}

static void count_message(struct tally *t, uint64_t seq, uint64_t len) {
    t->bytes += len;
    t->digest = test_mix(t->digest + (seq ^ len << 40));
    fipc_store64_relaxed(&t->messages, seq);
}

/* ---- messages ------------------------------------------------------------------------------- */

struct shape {
    uint64_t len;
    uint32_t pieces;
    bool stamped;
};

static struct shape shape_of(uint64_t seq) {
    uint64_t u = test_mix(seq * 2 + options.seed);
    bool large = u % options.large_every == 0;
    struct shape s = {.len = large ? test_log_uniform(test_mix(u), largest)
                                   : (u >> 32) % (SMALL_BYTES + 1)};
    s.pieces = (u >> 20) % 16 == 0 ? 1 + (uint32_t)(u >> 16) % PIECES_MAX : 1;
    s.stamped = seq % STAMP_EVERY == 0 && s.len >= STAMP_BYTES;
    return s;
}

static void write_message(char *p, uint64_t seq, const struct shape *s) {
    uint64_t from = 0;
    if (s->stamped) {
        uint64_t stamp[3] = {seq, fipc_now(), 0};
        stamp[2] = test_mix(stamp[0] ^ test_mix(stamp[1] ^ s->len));
        memcpy(p, stamp, from = sizeof stamp);
    }
    pattern_fill(p + from, seq, from, s->len - from);
}

static void check_stretch(const char *p, uint64_t seq, uint64_t from, uint64_t n) {
    if (!pattern_is(p, seq, from, n)) {
        FAIL("message %" PRIu64 ": wrong bytes among [%" PRIu64 ", %" PRIu64 ")", seq, from,
             from + n);
    }
}

static void check_stamp(struct tally *t, const char *p, uint64_t seq, uint64_t len) {
    uint64_t stamp[3];
    memcpy(stamp, p, sizeof stamp);
    CHECK_EQ(stamp[0], seq);
    CHECK_EQ(stamp[2], test_mix(stamp[0] ^ test_mix(stamp[1] ^ len)));
    uint64_t now = fipc_now();
    CHECK(now >= stamp[1]);
    count_latency(t, now - stamp[1]);
}

static void check_bare(struct tally *t, const char *p, uint64_t len, uint64_t seq,
                       const struct shape *s) {
    CHECK_EQ(len, s->len);
    if (s->stamped) {
        check_stamp(t, p, seq, len);
    }
    uint64_t from = s->stamped ? STAMP_BYTES : 0;
    check_stretch(p + from, seq, from, len - from);
}

static void check_owned(struct tally *t, const struct fipc_message *m, uint64_t seq,
                        const struct shape *s) {
    CHECK_EQ(m->tag, (uint32_t)seq);
    CHECK_EQ(m->n, s->pieces);
    if (m->n == 1) {
        check_bare(t, m->blocks[0].ptr, m->blocks[0].len, seq, s);
        return;
    }
    uint64_t at = 0;
    char head[STAMP_BYTES];
    for (uint64_t i = 0; i < m->n; i++) {
        const char *p = m->blocks[i].ptr;
        uint64_t n = m->blocks[i].len;
        CHECK(n <= s->len - at);
        uint64_t skip = 0;
        if (s->stamped && at < STAMP_BYTES) {
            skip = n < STAMP_BYTES - at ? n : STAMP_BYTES - at;
            memcpy(head + at, p, skip);
        }
        check_stretch(p + skip, seq, at + skip, n - skip);
        at += n;
    }
    CHECK_EQ(at, s->len);
    if (s->stamped) {
        check_stamp(t, head, seq, at);
    }
}

/* ---- what happens to a process besides ------------------------------------------------------ */

struct trouble {
    uint64_t random;
    uint64_t next_fork;
    fipc_queue *q;
    struct tally *tally;
};

static void on_signal(int number) { (void)number; }

static void trouble_begin(struct trouble *w, uint32_t process, fipc_queue *q) {
    w->random = options.seed << 20 | process;
    w->next_fork = fipc_now() + test_next(&w->random) % FORK_NS;
    w->q = q;
    w->tally = &shared->tally[process];
    if (!options.quiet) {
        struct sigaction act = {.sa_handler = on_signal}; /* no SA_RESTART: waits are to end */
        CHECK(sigaction(SIGALRM, &act, NULL) == 0);
        struct itimerval every = {.it_interval.tv_usec = SIGNAL_US,
                                  .it_value.tv_usec = SIGNAL_US + process};
        CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
    }
}

/* A child may do nothing with its parent's end but free it. */
static void fork_once(struct trouble *w) {
    bool frees = test_next(&w->random) % 2 != 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct fipc_error err;
        struct fipc_call call = {.deadline = 0};
        struct fipc_message m;
        int rc = fipc_queue_recv(w->q, &call, &m, &err);
        if (frees) {
            fipc_queue_free(w->q);
        }
        _exit(rc == FIPC_FORKED ? 0 : 1);
    }
    CHECK_EXITED(pid);
    w->tally->forks++;
}

static void trouble_now_and_then(struct trouble *w, bool slow) {
    if (options.quiet) {
        return;
    }
    uint64_t r = test_next(&w->random);
    if (slow && r % (NAP_EVERY / STAMP_EVERY) == 0) {
        struct timespec t = {.tv_nsec = (long)(r >> 32) % NAP_NS};
        nanosleep(&t, NULL);
        w->tally->naps++;
    }
    if (r % 16 == 0) {
        uint64_t now = fipc_now();
        if (now > w->next_fork) {
            fork_once(w);
            w->next_fork = now + FORK_NS;
        }
    }
}

/* Polls, short waits of some lengths, and for ever. */
static uint64_t some_deadline(struct trouble *w) {
    uint64_t r = test_next(&w->random);
    switch (r % 4) {
    case 0: w->tally->polls++; return 0;
    case 1: return fipc_now() + (r >> 32) % 100000;
    case 2: return fipc_now() + (r >> 32) % 20000000;
    default: return FIPC_FOREVER;
    }
}

/* True when the call is to be made again; anything unforeseen fails. */
static bool again(struct trouble *w, int rc, const struct fipc_error *err) {
    w->tally->timeouts += rc == FIPC_TIMEOUT;
    w->tally->interrupts += rc == FIPC_INTERRUPTED;
    if (rc == FIPC_TIMEOUT || rc == FIPC_INTERRUPTED) {
        return true;
    }
    if (rc != FIPC_OK && rc != FIPC_CLOSED) {
        FAIL("%s (reader %d, pid %" PRId64 ", everyone is alive) %s", fipc_status_text(rc),
             err->reader, err->pid, err->text);
    }
    return false;
}

/* ---- the processes -------------------------------------------------------------------------- */

static void send_message(struct trouble *w, const char *p, uint64_t seq, const struct shape *s) {
    struct fipc_piece pieces[PIECES_MAX];
    uint64_t at = 0;
    for (uint32_t i = 0; i < s->pieces; i++) {
        uint64_t n = i + 1 == s->pieces ? s->len - at : s->len / s->pieces;
        pieces[i] = (struct fipc_piece){.ptr = p + at, .len = n};
        at += n;
    }
    struct fipc_error err;
    int rc = fipc_queue_send_inline(w->q, pieces, s->pieces, (uint32_t)seq, &err);
    if (rc != FIPC_WOULD_BLOCK) {
        CHECK_RC(rc, FIPC_OK);
        return;
    }
    struct fipc_call call = {.deadline = some_deadline(w), .signals = seq % 2};
    while (
        again(w, rc = fipc_queue_send(w->q, pieces, s->pieces, (uint32_t)seq, &call, &err), &err)) {
        if (rc == FIPC_TIMEOUT) { /* none of it arrives; so it is sent from its beginning */
            call = (struct fipc_call){.deadline = some_deadline(w), .signals = seq % 2};
        }
    }
    CHECK_RC(rc, FIPC_OK);
}

static void run_writer(fipc_queue *q) {
    struct tally *t = &shared->tally[0];
    struct trouble w;
    trouble_begin(&w, 0, q);
    char *room = malloc(largest);
    CHECK(room != NULL);
    struct fipc_call ready = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    while (again(&w, fipc_queue_wait_ready(q, &ready, &err), &err)) {
    }
    uint64_t end = options.seconds ? fipc_now() + options.seconds * UINT64_C(1000000000) : 0;
    uint64_t seq = 1;
    for (;; seq++) {
        struct shape s = shape_of(seq);
        write_message(room, seq, &s);
        send_message(&w, room, seq, &s);
        count_message(t, seq, s.len);
        if (seq == options.messages) {
            break;
        }
        if (seq % STAMP_EVERY == 0) {
            trouble_now_and_then(&w, false);
            if (end != 0 && fipc_now() >= end) {
                break;
            }
        }
    }
    fipc_store64_release(&shared->last, seq);
    free(room);
    fipc_queue_free(q);
}

/* Reads message `seq`; false when the writer has closed. Half of the messages that could be seen in
 * place are copied out all the same. */
static bool read_message(struct trouble *w, uint64_t seq, const struct shape *s) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = some_deadline(w), .signals = seq % 2};
    bool peek = test_mix(seq) % 2;
    for (;;) {
        int rc = FIPC_INVALID;
        if (peek) {
            const void *p;
            uint64_t len;
            uint32_t tag;
            rc = fipc_queue_peek(w->q, FIPC_BRIEF_BYTES, &p, &len, &tag, &err);
            if (rc == FIPC_OK) {
                CHECK_EQ(tag, (uint32_t)seq);
                check_bare(w->tally, p, len, seq, s);
                fipc_queue_peek_done(w->q);
                return true;
            }
        }
        if (rc == FIPC_INVALID) { /* not to be seen in place */
            struct fipc_message m;
            rc = fipc_queue_recv(w->q, &call, &m, &err);
            if (rc == FIPC_OK) {
                check_owned(w->tally, &m, seq, s);
                fipc_message_clear(&m);
                return true;
            }
        }
        if (rc == FIPC_WOULD_BLOCK) {
            rc = fipc_queue_wait_readable(w->q, &call, &err);
        }
        if (again(w, rc, &err)) {
            call = rc == FIPC_TIMEOUT
                       ? (struct fipc_call){.deadline = some_deadline(w), .signals = seq % 2}
                       : call;
        } else if (rc == FIPC_CLOSED) {
            return false;
        }
    }
}

static void run_reader(const struct fipc_address *address, uint32_t rank,
                       const struct fipc_config *config) {
    fipc_queue *q = peers_attach_at(address, rank, config);
    struct tally *t = &shared->tally[1 + rank];
    struct trouble w;
    trouble_begin(&w, 1 + rank, q);
    bool slow = rank % 2 != 0 || config->n_readers == 1;
    uint64_t before = 0;
    for (uint64_t seq = 1;; seq++) {
        struct shape s = shape_of(seq);
        if (!read_message(&w, seq, &s)) {
            CHECK_EQ(seq - 1, fipc_load64_acquire(&shared->last));
            break;
        }
        count_message(t, seq, s.len);
        if (seq % STAMP_EVERY == 0) {
            uint64_t now = fipc_now();
            uint64_t gap = before ? now - before : 0;
            t->stalls += gap > STALL_NS;
            t->longest_ns = gap > t->longest_ns ? gap : t->longest_ns;
            trouble_now_and_then(&w, slow);
            before = now;
        }
    }
    fipc_queue_free(q);
}

struct reader_args {
    struct fipc_address address;
    const struct fipc_config *config;
    uint32_t rank;
};

static void reader_main(void *arg) {
    const struct reader_args *a = arg;
    run_reader(&a->address, a->rank, a->config);
}

struct writer_args {
    const struct fipc_config *config;
    struct fipc_address *address; /* shared: pid 0 until it is there */
};

static void writer_main(void *arg) {
    struct writer_args *a = arg;
    fipc_queue *q = peers_create(a->config);
    struct fipc_address here = peers_address(q);
    int64_t pid = here.pid;
    here.pid = 0;
    *a->address = here;
    __atomic_store_n(&a->address->pid, pid, __ATOMIC_RELEASE);
    run_writer(q);
}

/* ---- the watch ------------------------------------------------------------------------------ */

static pid_t pids[MAX_PROCESSES];

/* A reader may get nothing in a window in which all processes of the run together had less than a
 * tenth of the CPUs: then others had them. (Who livelocks has a CPU, and uses it.) */
#define STARVED_SHARE 10

/* How long all have run, in ns. */
static uint64_t ran(uint32_t n) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        char path[64], text[128];
        snprintf(path, sizeof path, "/proc/%d/schedstat", (int)pids[i]);
        FILE *f = fopen(path, "re");
        if (f != NULL) {
            sum += fgets(text, sizeof text, f) != NULL ? strtoull(text, NULL, 10) : 0;
            fclose(f);
        }
    }
    return sum;
}

static uint64_t starved;

/* Waits for the end of all; counts the windows in which a reader got nothing new. */
static uint64_t watch(uint32_t n) {
    uint64_t seen[MAX_PROCESSES] = {0};
    uint64_t still = 0;
    uint64_t ran_before = 0;
    uint64_t cpus = (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t running = n;
    uint64_t window = options.window_ms * 1000000;
    uint64_t begun = fipc_now();
    uint64_t next = begun + window;
    uint64_t told = begun;
    while (running > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        CHECK(pid >= 0);
        if (pid > 0) {
            if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
                FAIL("process %d ended with wait status 0x%x", (int)pid, (unsigned)status);
            }
            running--;
            continue;
        }
        struct timespec t = {.tv_nsec = 20000000};
        nanosleep(&t, NULL);
        uint64_t now = fipc_now();
        bool over = fipc_load64_acquire(&shared->last) != 0;
        bool started = fipc_load64_relaxed(&shared->tally[0].messages) != 0;
        if (over || !started) {
            next = now + window;
            continue;
        }
        if (now < next) {
            continue;
        }
        uint64_t ran_now = ran(n);
        bool had_cpus = ran_now == 0 || ran_now - ran_before >= cpus * window / STARVED_SHARE;
        bool none = false;
        ran_before = ran_now;
        for (uint32_t i = 1; i < n; i++) {
            uint64_t messages = fipc_load64_relaxed(&shared->tally[i].messages);
            if (messages == seen[i] && had_cpus) {
                still++;
                fprintf(stderr, "reader %u: nothing new in %.1f s, after message %" PRIu64 "\n",
                        i - 1, (double)(now - next + window) / 1e9, messages);
            }
            none |= messages == seen[i];
            seen[i] = messages;
        }
        starved += none && !had_cpus;
        next = now + window;
        if (now - told > UINT64_C(30000000000)) {
            told = now;
            fprintf(stderr, "%.0f s: %" PRIu64 " messages\n", (double)(now - begun) / 1e9,
                    fipc_load64_relaxed(&shared->tally[0].messages));
        }
    }
    return still;
}

static double percentile(const struct tally *t, double share) {
    uint64_t want = (uint64_t)((double)t->stamped * share);
    uint64_t sum = 0;
    for (unsigned b = 0; b < BUCKETS; b++) {
        sum += t->bucket[b];
        if (sum > want) {
            uint64_t top = bucket_top(b);
            return (double)(top < t->most_ns ? top : t->most_ns) / 1e3;
        }
    }
    return (double)t->most_ns / 1e3;
}

static void report(uint32_t n, uint64_t ns, uint64_t still) {
    const struct tally *writer = &shared->tally[0];
    struct tally all = {0};
    uint64_t delivered = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct tally *t = &shared->tally[i];
        if (i > 0) {
            CHECK_EQ(fipc_load64_relaxed(&t->messages), fipc_load64_relaxed(&writer->messages));
            CHECK_EQ(t->bytes, writer->bytes);
            CHECK_EQ(t->digest, writer->digest);
            delivered += fipc_load64_relaxed(&t->messages);
        }
        all.least_ns = t->stamped && (all.stamped == 0 || t->least_ns < all.least_ns)
                           ? t->least_ns
                           : all.least_ns;
        all.most_ns = t->most_ns > all.most_ns ? t->most_ns : all.most_ns;
        all.stamped += t->stamped;
        for (unsigned b = 0; b < BUCKETS; b++) {
            all.bucket[b] += t->bucket[b];
        }
        all.polls += t->polls;
        all.timeouts += t->timeouts;
        all.interrupts += t->interrupts;
        all.naps += t->naps;
        all.forks += t->forks;
        all.stalls += t->stalls;
        all.longest_ns = t->longest_ns > all.longest_ns ? t->longest_ns : all.longest_ns;
    }
    uint64_t messages = fipc_load64_relaxed(&writer->messages);
    printf("processes %u (1 writer, %u readers) on %ld CPUs\n", n, n - 1,
           sysconf(_SC_NPROCESSORS_ONLN));
    printf("messages %" PRIu64 "\n", messages);
    printf("verified %" PRIu64 "\n", delivered);
    printf("bytes %" PRIu64 "\n", writer->bytes);
    printf("seconds %.1f\n", (double)ns / 1e9);
    printf("messages_per_second %.0f\n", (double)messages / ((double)ns / 1e9));
    printf("latency_us min %.1f p50 %.1f p99.9 %.1f max %.1f (%" PRIu64 " stamped)\n",
           (double)all.least_ns / 1e3, percentile(&all, 0.5), percentile(&all, 0.999),
           (double)all.most_ns / 1e3, all.stamped);
    printf("stalls %" PRIu64 " over %u ms, longest %.1f ms\n", all.stalls, STALL_NS / 1000000,
           (double)all.longest_ns / 1e6);
    printf("polls %" PRIu64 " timeouts %" PRIu64 " interrupts %" PRIu64 " naps %" PRIu64
           " forks %" PRIu64 "\n",
           all.polls, all.timeouts, all.interrupts, all.naps, all.forks);
    printf("windows_without_progress %" PRIu64 " of %" PRIu64 " ms; in %" PRIu64
           " more other programs had nearly all of the CPUs\n",
           still, options.window_ms, starved);
    CHECK_EQ(still, 0);
}

static void parse(int argc, char **argv) {
    static const struct option known[] = {{"messages", required_argument, NULL, 'm'},
                                          {"seconds", required_argument, NULL, 's'},
                                          {"processes", required_argument, NULL, 'p'},
                                          {"over", no_argument, NULL, 'o'},
                                          {"mostly-small", no_argument, NULL, 't'},
                                          {"seed", required_argument, NULL, 'r'},
                                          {"window-ms", required_argument, NULL, 'w'},
                                          {"quiet", no_argument, NULL, 'q'},
                                          {NULL, 0, NULL, 0}};
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    options.processes = (uint32_t)(cpus < 2 ? 2 : cpus);
    int c;
    while ((c = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (c) {
        case 'm': options.messages = (uint64_t)strtod(optarg, NULL); break; /* also 1e9 */
        case 's': options.seconds = strtoull(optarg, NULL, 10); break;
        case 'p': options.processes = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'o': options.processes = (uint32_t)(4 * cpus); break;
        case 't': options.large_every = 4096; break;
        case 'r': options.seed = strtoull(optarg, NULL, 10); break;
        case 'w': options.window_ms = strtoull(optarg, NULL, 10); break;
        case 'q': options.quiet = true; break;
        default: exit(2);
        }
    }
    if ((options.messages == 0) == (options.seconds == 0) || options.processes < 2 ||
        options.processes > MAX_PROCESSES || options.window_ms == 0 || optind != argc) {
        fprintf(stderr, "stress: give --messages N or --seconds N; 2 to %d processes\n",
                MAX_PROCESSES);
        exit(2);
    }
}

int main(int argc, char **argv) {
    test_name = "stress";
    setvbuf(stdout, NULL, _IOLBF, 0);
    parse(argc, argv);
    uint32_t n = options.processes;
    size_t bytes = sizeof *shared + n * sizeof(struct tally);
    shared = test_share(bytes);
    struct fipc_config config = peers_config(n - 1);
    config.n_slots = 256;
    config.n_chunks = 6;
    config.chunk_bytes = chunk_bytes;
    config.n_cpus = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    struct fipc_address *address = test_share(sizeof *address);
    struct writer_args writer = {.config = &config, .address = address};
    pids[0] = test_fork(writer_main, &writer);
    UNTIL(__atomic_load_n(&address->pid, __ATOMIC_ACQUIRE) != 0);
    for (uint32_t i = 1; i < n; i++) {
        struct reader_args reader = {.address = *address, .config = &config, .rank = i - 1};
        pids[i] = test_fork(reader_main, &reader);
    }
    uint64_t begun = fipc_now();
    uint64_t still = watch(n);
    report(n, fipc_now() - begun, still);
    return 0;
}
