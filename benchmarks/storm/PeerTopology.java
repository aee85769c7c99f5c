import java.io.FileWriter;
import java.io.PrintWriter;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;
import org.apache.storm.Config;
import org.apache.storm.StormSubmitter;
import org.apache.storm.generated.KillOptions;
import org.apache.storm.spout.SpoutOutputCollector;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.topology.BasicOutputCollector;
import org.apache.storm.topology.OutputFieldsDeclarer;
import org.apache.storm.topology.TopologyBuilder;
import org.apache.storm.topology.base.BaseBasicBolt;
import org.apache.storm.topology.base.BaseRichSpout;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;
import org.apache.storm.utils.NimbusClient;

/** The topologies of peer_planes.py for Apache Storm: a word count, and a chain of ten bolts. */
public class PeerTopology {
    /** Writes the log that peer_logs.py reads. */
    static class SpoutLog {
        private final PrintWriter out;
        private final double[] took = new double[5000];
        private int taken;
        private long emitted;
        private long acked;
        private long stamped;
        private long told;

        SpoutLog(String folder, int task) {
            try {
                out = new PrintWriter(new FileWriter(folder + "/spout-" + task + "-" + ProcessHandle.current().pid() + ".log"), true);
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        }

        void emitted() {
            long now = System.currentTimeMillis();
            if (emitted++ == 0) {
                out.println("b " + now / 1e3);
            }
            tell(now);
        }

        void acked(double millis) {
            long now = System.currentTimeMillis();
            acked++;
            took[taken++ % took.length] = millis;
            if (now - stamped >= 5) {
                stamped = now;
                out.println("a " + now / 1e3);
            }
            tell(now);
        }

        private void tell(long now) {
            if (now - told < 1000) {
                return;
            }
            told = now;
            double[] sorted = Arrays.copyOf(took, Math.min(taken, took.length));
            Arrays.sort(sorted);
            String quantiles = sorted.length == 0 ? "" : " " + sorted[sorted.length / 2] + " " + sorted[sorted.length * 99 / 100];
            out.println("s " + now / 1e3 + " " + emitted + " " + acked + quantiles);
        }
    }

    /** Emits at bench.rate (tuples a second of each task; 0: as fast as it may). */
    public abstract static class PacedSpout extends BaseRichSpout {
        private transient SpoutLog log;
        private transient SpoutOutputCollector collector;
        private double rate;
        private boolean acked;
        private long count;
        private long began;

        abstract Values values(long number);

        @Override
        public void open(Map<String, Object> conf, TopologyContext context, SpoutOutputCollector collector) {
            this.collector = collector;
            rate = Double.parseDouble(conf.get("bench.rate").toString());
            acked = Boolean.parseBoolean(conf.get("bench.acked").toString());
            log = new SpoutLog(conf.get("bench.folder").toString(), context.getThisTaskId());
            began = System.nanoTime();
        }

        @Override
        public void nextTuple() {
            long now = System.nanoTime();
            if (rate > 0 && count >= (now - began) / 1e9 * rate) {
                return;
            }
            Values values = values(count++);
            if (acked) {
                collector.emit(values, now);
            } else {
                collector.emit(values);
            }
            log.emitted();
        }

        @Override
        public void ack(Object id) {
            log.acked((System.nanoTime() - (Long) id) / 1e6);
        }
    }

    /** Sentences of ten words out of 5,000. */
    public static class SentenceSpout extends PacedSpout {
        private transient String[] sentences;

        @Override
        public void open(Map<String, Object> conf, TopologyContext context, SpoutOutputCollector collector) {
            super.open(conf, context, collector);
            Random draw = new Random(context.getThisTaskId());
            sentences = new String[2000];
            for (int number = 0; number < sentences.length; number++) {
                StringBuilder text = new StringBuilder();
                for (int word = 0; word < 10; word++) {
                    text.append(word == 0 ? "" : " ").append("word").append(draw.nextInt(5000));
                }
                sentences[number] = text.toString();
            }
        }

        @Override
        Values values(long number) {
            return new Values(sentences[(int) (number % sentences.length)]);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
            declarer.declare(new Fields("sentence"));
        }
    }

    /** Keys and the time of emission. */
    public static class NumberSpout extends PacedSpout {
        @Override
        Values values(long number) {
            return new Values(number % 1000, System.nanoTime() / 1e9);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
            declarer.declare(new Fields("key", "at"));
        }
    }

    /** One tuple for each word. */
    public static class SplitBolt extends BaseBasicBolt {
        @Override
        public void execute(Tuple tuple, BasicOutputCollector collector) {
            for (String word : tuple.getString(0).split(" ")) {
                collector.emit(new Values(word));
            }
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
            declarer.declare(new Fields("word"));
        }
    }

    /** Counts words. */
    public static class CountBolt extends BaseBasicBolt {
        private final Map<String, Long> counts = new HashMap<>();

        @Override
        public void execute(Tuple tuple, BasicOutputCollector collector) {
            counts.merge(tuple.getString(0), 1L, Long::sum);
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
        }
    }

    /** Hands on what comes. */
    public static class PassBolt extends BaseBasicBolt {
        @Override
        public void execute(Tuple tuple, BasicOutputCollector collector) {
            collector.emit(new Values(tuple.getValue(0), tuple.getValue(1)));
        }

        @Override
        public void declareOutputFields(OutputFieldsDeclarer declarer) {
            declarer.declare(new Fields("key", "at"));
        }
    }

    /** Arguments: NAME words|chain WORKERS, then KEY=VALUE of the topology's conf; or NAME kill. */
    public static void main(String[] args) throws Exception {
        if (args[1].equals("kill")) {
            KillOptions options = new KillOptions();
            options.set_wait_secs(0);
            NimbusClient.withConfiguredClient(nimbus -> nimbus.killTopologyWithOpts(args[0], options));
            return;
        }
        int workers = Integer.parseInt(args[2]);
        TopologyBuilder builder = new TopologyBuilder();
        if (args[1].equals("words")) {
            builder.setSpout("sentences", new SentenceSpout(), workers);
            builder.setBolt("split", new SplitBolt(), workers).shuffleGrouping("sentences");
            builder.setBolt("count", new CountBolt(), workers).fieldsGrouping("split", new Fields("word"));
        } else {
            builder.setSpout("numbers", new NumberSpout(), 1);
            String before = "numbers";
            for (int number = 1; number <= 10; number++) {
                builder.setBolt("pass" + number, new PassBolt(), 2).localOrShuffleGrouping(before);
                before = "pass" + number;
            }
        }
        Config conf = new Config();
        conf.setNumWorkers(workers);
        for (int at = 3; at < args.length; at++) {
            String[] pair = args[at].split("=", 2);
            Object value = pair[1];
            if (pair[1].matches("-?[0-9]+")) {
                value = Long.parseLong(pair[1]);
            } else if (pair[1].matches("true|false")) {
                value = Boolean.parseBoolean(pair[1]);
            }
            conf.put(pair[0], value);
        }
        StormSubmitter.submitTopology(args[0], conf, builder.createTopology());
    }
}
